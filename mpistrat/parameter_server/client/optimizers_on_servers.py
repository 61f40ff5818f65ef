"""How a rank makes optimizers on servers, and reads and changes the state that they keep for arrays there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpistrat.parameter_server.protocol import messages
from mpistrat.parameter_server.protocol.messages import Address
from mpistrat.parameter_server.protocol.routes import Routes

if TYPE_CHECKING:
    from mpistrat.parameter_server.server.server_optimizers import OptimizerDefinition, State


class OptimizersOnServers:
    """An optimizer has a number, equal on all workers. Args: routes: to the servers."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes

    def make(
        self,
        optimizer: int,
        definition: OptimizerDefinition,
        arrays: Sequence[tuple[Address, bool]],
    ) -> None:
        """Let the servers keep an optimizer's state for arrays. Of several workers that ask for it, one is enough.

        Args:
            optimizer: its number.
            arrays: each with whether it is a part of a variable.
        Raises: TypeError: the definition cannot be pickled, or does not work for a part.
        """
        import cloudpickle  # here, because it makes importing mpistrat slower

        packed = cloudpickle.dumps(definition)  # also of classes of the main script
        keys: dict[int, list[tuple[int, bool]]] = {}  # by server
        for address, shard in arrays:
            keys.setdefault(address.server, []).append((address.key, shard))
        for call in [
            self._routes.call(server, messages.MAKE_OPTIMIZER, (optimizer, packed, of_server))
            for server, of_server in keys.items()
        ]:
            call.wait()

    def state(self, optimizer: int, address: Address) -> State:
        """The state that the optimizer has for an array: NumPy arrays and numbers, by name."""
        body = optimizer, address.key
        state: State = self._routes.call(address.server, messages.OPTIMIZER_STATE, body).wait()
        return state

    def load_state(self, optimizer: int, address: Address, state: State) -> None:
        body = optimizer, address.key, state
        self._routes.call(address.server, messages.LOAD_OPTIMIZER_STATE, body).wait()
