"""How a rank uses optimizers on servers, and their state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpistrat.parameter_server.protocol import messages
from mpistrat.parameter_server.protocol.messages import Address
from mpistrat.parameter_server.protocol.routes import Routes

if TYPE_CHECKING:
    from mpistrat.parameter_server.server.server_optimizers import OptimizerDefinition, State


class OptimizersOnServers:
    """Makes optimizers on servers, and reads and changes their state. Optimizers have numbers, equal on all workers."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes

    def make(
        self,
        optimizer: int,
        definition: OptimizerDefinition,
        arrays: Sequence[tuple[Address, bool]],
    ) -> None:
        """Have the servers make an optimizer for arrays, and wait until they have.

        Several workers may ask for the same optimizer; the servers make it once.

        Args:
            optimizer: the optimizer's number.
            definition: the optimizer's class and arguments.
            arrays: the address of each array, and whether the array is one part of a split variable.
        Raises: TypeError if the definition cannot be pickled, or the optimizer cannot step a part.
        """
        import cloudpickle  # imported here, so that `import mpistrat` stays fast

        packed = cloudpickle.dumps(definition)  # also of classes of the main script
        keys: dict[int, list[tuple[int, bool]]] = {}  # by server
        for address, shard in arrays:
            of_server = keys.setdefault(address.server, [])
            of_server.append((address.key, shard))
        calls = []
        for server, of_server in keys.items():
            body = optimizer, packed, of_server
            calls.append(self._routes.call(server, messages.MAKE_OPTIMIZER, body))
        for call in calls:
            call.wait()

    def state(self, optimizer: int, address: Address) -> State:
        """Return a copy of an optimizer's state for an array: NumPy arrays and numbers by name, {} before a step."""
        body = optimizer, address.key
        call = self._routes.call(address.server, messages.OPTIMIZER_STATE, body)
        state: State = call.wait()
        return state

    def load_state(self, optimizer: int, address: Address, state: State) -> None:
        body = optimizer, address.key, state
        call = self._routes.call(address.server, messages.LOAD_OPTIMIZER_STATE, body)
        call.wait()
