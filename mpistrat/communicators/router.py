"""`Router`, the communicator of several ranks: they agree on each call, then a transport moves its bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

from mpistrat.arrays import is_on_accelerator
from mpistrat.communicators.collective_calls import CollectiveCalls
from mpistrat.communicators.collectives.collective import Collective, kind_of
from mpistrat.communicators.contract.call_signature import CallSignature, signature_of
from mpistrat.communicators.contract.unchecked import UNCHECKED, Unchecked
from mpistrat.communicators.graph_capture import is_capturing, refusal
from mpistrat.communicators.node.memory import NO_MEMORY, CheckedMemory, NodeMemory
from mpistrat.communicators.node.slots import SharedSlots, Slot
from mpistrat.communicators.node.small_calls import TOO_LARGE, SmallCall
from mpistrat.communicators.transport import Transport
from mpistrat.liveness.records.watch import CommunicatorWatch
from mpistrat.options import CommunicationImplementation

if TYPE_CHECKING:
    from mpistrat.communicators.transports.mpi import MpiTransport

_KNOWN_CALLS = 4096  # kinds of calls that a router keeps; for one more, it begins anew


@dataclass(frozen=True)
class Transports:
    """The transports (ways to move bytes) of a group of ranks.

    Attributes:
        mpi: takes the calls that no other transport takes, and all objects.
        preferred: the transports that are asked before `mpi`, in this order.
        memory: the memory that the ranks of a node share.
        slots: shared memory for the bytes of small calls; None where not all ranks share a node's memory.
        forced: from an implementation that a program may ask for to its transports. A missing implementation uses
            `self`.
        of_part: makes the transports of a communicator that is split off. It is a collective function of that
            communicator's MPI transport and name, and returns the transports and the rank's watch (its record in shared
            memory of the calls that it waits in). None: a part moves all bytes by MPI.
    """

    mpi: MpiTransport
    preferred: Sequence[Transport] = ()
    memory: NodeMemory = NO_MEMORY
    slots: SharedSlots | None = None
    forced: Mapping[CommunicationImplementation, Transports] = field(default_factory=dict)
    of_part: Callable[[MpiTransport, str], tuple[Transports, CommunicatorWatch]] | None = None

    def explain(self) -> str:
        text = self.mpi.explain()
        for transport in reversed(self.preferred):
            text = transport.explain(text)
        return text


class KnownCall(NamedTuple):
    """A kind of call: all calls with equal `Collective.key`, on one kind of device.

    Attributes:
        signature: the description of the call that ranks compare.
        small: moves the call's bytes through slots (shared memory) while the ranks agree; None if a transport moves
            them.
        slot: the slot that this rank fills for the call; None if it fills none.
        meets: True if a transport moves the bytes of a buffer on the host, at least one byte. An all-reduce then ends
            on no rank before all ranks have entered it, so it may go without agreement inside `following`.
    """

    signature: CallSignature
    small: SmallCall | None
    slot: Slot | None
    meets: bool


class Router(CollectiveCalls):
    """The communicator of several ranks: they agree on each call, then a transport moves its bytes.

    Args:
        transports: move the bytes.
        contract: checks that all ranks make the same call, and records it. UNCHECKED does neither: for a group that
            another router uses inside its own calls.
        last_words: words that end the signature (the description that ranks compare) of each call.

    Attributes:
        mpi: the MPI transport of `transports`.
        known_calls: the kinds of calls that this router has made so far, by `Collective.key`.
    """

    def __init__(
        self, transports: Transports, contract: Unchecked = UNCHECKED, *last_words: str
    ) -> None:
        self.transports = transports
        self.mpi = transports.mpi
        self.contract = contract
        self.rank = transports.mpi.rank
        self.size = transports.mpi.size
        self.thread_multiple = transports.mpi.thread_multiple
        self.on_one_node = contract.watch is not None and contract.watch.peers is not None
        # Only the first transport can be one for devices: `move_by` puts it there.
        first = [*transports.preferred, transports.mpi][0]
        self.takes_device_buffers = first.takes_device_buffers
        self.ordered_by_streams = first.ordered_by_streams
        # Returns the context of the call that the words describe. It does not refer to this communicator.
        self._enter = lambda *words: contract.enter(signature_of(words + last_words))
        self.memory = CheckedMemory(transports.memory, self._enter)
        # Without an agreement there are no small calls, because they move while the ranks agree.
        self._slots = None if contract.agreement is None else transports.slots
        self._last_words = last_words
        self.known_calls: dict[tuple[Any, ...], KnownCall] = {}
        self._overridden: dict[CommunicationImplementation, _Overridden] = {}

    # Collectives

    def make(
        self, collective: Collective, cause: Exception | None = None, follows: bool = False
    ) -> Any:
        key = collective.key()
        if self.takes_device_buffers:
            buffer = collective.buffer
            if is_capturing(buffer):
                self.raise_together(refusal(collective.name, self.rank))
            key = *key, kind_of(buffer)
        known = self.known_calls.get(key) or self.learn(key, collective)
        signature, small, slot, meets = known
        contract = self.contract
        payload = None
        if small is not None:
            try:
                payload = small.payload(collective)
            except Exception as error:
                contract.raise_together(error)
        with contract.enter(signature, cause, slot, payload, follows and meets):
            if small is not None:
                result = small.take(contract.agreed & 1, collective, payload)
                if result is not TOO_LARGE:
                    return result
            for transport in self.transports.preferred:
                move = transport.choose(collective)
                if move is not None:
                    return move(collective)
            return self.mpi.move(collective)

    def learn(self, key: tuple[Any, ...], collective: Collective) -> KnownCall:
        """Check the first call of a kind, keep the kind under `key`, and return it.

        Raises: ValueError or TypeError if the operands do not fit the call; the other ranks raise
            CollectiveMismatchError.
        """
        with self.raising_together():
            collective.check(self.size)
            small = None
            on_host = not is_on_accelerator(collective.buffer)
            if self._slots is not None and on_host:
                small = collective.small_form(self._slots)
            slot = small if small is not None and small.writes else None
            signature = signature_of((*collective.words(), *self._last_words))
            meets = small is None and on_host and collective.buffer.nbytes > 0
        if len(self.known_calls) == _KNOWN_CALLS:
            self.known_calls.clear()
        self.known_calls[key] = known = KnownCall(signature, small, slot, meets)
        return known

    def broadcast_object(self, value: Any, root: int = 0, *, label: str = "") -> Any:
        root = index(root)
        with self._enter("broadcast_object", root, label):
            return self.mpi.comm.bcast(value, root)

    def all_gather_object(self, value: Any, *, label: str = "") -> list[Any]:
        with self._enter("all_gather_object", label):
            return self.mpi.comm.allgather(value)

    def barrier(self, *, label: str = "") -> None:
        with self._enter("barrier", label):
            self.mpi.comm.Barrier()

    def split(self, color: int, key: int = 0) -> Router:
        with self._enter("split"):
            mpi = self.mpi.split(color, key)
            name = f"{self.contract.name}/{len(self.contract.parts)}:{color}"
            transports = Transports(mpi)
            watch = None
            if self.transports.of_part is not None:
                transports, watch = self.transports.of_part(mpi, name)
            return Router(transports, self.contract.of_part(mpi, name, watch))

    # Implementations

    def by(self, implementation: CommunicationImplementation) -> Router:
        if implementation is CommunicationImplementation.AUTO:
            return self
        if implementation not in self._overridden:
            self._overridden[implementation] = _Overridden(self, implementation)
        return self._overridden[implementation]

    def move_by(
        self, transport: Transport, forced: Mapping[CommunicationImplementation, Transport] = {}
    ) -> None:
        """From now on, let `transport` take calls before all other transports. Collective.

        Called by: the start of GPU transports and of XLA.

        Args:
            transport: a transport that connects this communicator's ranks.
            forced: from an implementation that a program may ask for to the transport that then comes first, in place
                of `transport`.
        """
        others = self.transports.preferred
        known = {
            implementation: replace(self.transports, preferred=[first, *others])
            for implementation, first in forced.items()
        }
        self.transports = replace(
            self.transports,
            preferred=[transport, *others],
            forced={**self.transports.forced, **known},
        )
        self.takes_device_buffers = transport.takes_device_buffers
        self.ordered_by_streams = transport.ordered_by_streams
        self.known_calls.clear()
        self._overridden.clear()

    def explain(self) -> str:
        return self.transports.explain()


class _Overridden(Router):
    """The result of `router.by(implementation)`: the same ranks; `implementation` moves their bytes.

    Both share one contract, so it counts and records the calls of both.
    """

    def __init__(self, router: Router, implementation: CommunicationImplementation) -> None:
        transports = router.transports.forced.get(implementation, router.transports)
        super().__init__(transports, router.contract, f"by {implementation.name}")
        self._router = router
        self._implementation = implementation

    def split(self, color: int, key: int = 0) -> Router:
        return self._router.split(color, key).by(self._implementation)

    def by(self, implementation: CommunicationImplementation) -> Router:
        if implementation is CommunicationImplementation.AUTO:
            return self
        return self._router.by(implementation)

    def explain(self) -> str:
        return f"implementation={self._implementation.name} was asked for:\n{super().explain()}"
