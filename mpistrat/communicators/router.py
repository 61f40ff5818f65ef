"""`Router`, the communicator of several ranks: they agree on each call, then a transport moves its bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import TYPE_CHECKING, Any

from mpistrat.arrays import Array, dtype_name
from mpistrat.communicators.communicator import Communicator
from mpistrat.communicators.contract.call_signature import signature_of
from mpistrat.communicators.contract.unchecked import UNCHECKED, Unchecked
from mpistrat.communicators.graph_capture import is_capturing, refusal
from mpistrat.communicators.known_calls import Agreed, KnownCalls, words_of_label
from mpistrat.communicators.node.memory import NO_MEMORY, CheckedMemory, NodeMemory
from mpistrat.communicators.node.slots import SharedSlots
from mpistrat.communicators.node.small_calls import TOO_LARGE
from mpistrat.communicators.operand_checks import check_arrived, check_contiguous
from mpistrat.communicators.reduction import SUM, Reduction, as_reduction
from mpistrat.communicators.reduction.arithmetic import scale
from mpistrat.communicators.transport import Exchange, Operands, Transport
from mpistrat.liveness.records.watch import CommunicatorWatch
from mpistrat.options import CommunicationImplementation

if TYPE_CHECKING:
    from mpistrat.communicators.reduction.tree import ReductionTree
    from mpistrat.communicators.transports.mpi import MpiTransport


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

    def choose(self, call: str, operands: Operands) -> Exchange:
        """Return the object that moves the bytes of `call`. Collective.

        Returns: the object from the first of `preferred` that takes the call; `mpi` if none takes it.
        """
        for transport in self.preferred:
            mover = transport.choose(call, operands)
            if mover is not None:
                return mover
        return self.mpi

    def explain(self) -> str:
        text = self.mpi.explain()
        for transport in reversed(self.preferred):
            text = transport.explain(text)
        return text


class Router(Communicator):
    """The communicator of several ranks: they agree on each call, then a transport moves its bytes.

    Args:
        transports: move the bytes.
        contract: checks that all ranks make the same call, and records it. UNCHECKED does neither: for a group that
            another router uses inside its own calls.
        last_words: words that end the signature (the description that ranks compare) of each call.

    Attributes:
        mpi: the MPI transport of `transports`.
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
        slots = None if contract.agreement is None else transports.slots
        self._known = KnownCalls(
            self.size, slots, self.takes_device_buffers, last_words, contract.raise_together
        )
        self._overridden: dict[CommunicationImplementation, _Overridden] = {}

    # Collectives

    def all_reduce(
        self,
        buffer: Array,
        reduction: Reduction | str = SUM,
        *,
        out: Array | None = None,
        cause: Exception | None = None,
        follows: bool = False,
    ) -> None:
        if reduction.__class__ is not Reduction:
            reduction = as_reduction(reduction)
        operands = Operands(buffer, reduction, out)
        self._call("all_reduce", operands, reduction.agreed, cause, follows)

    def all_reduce_by_tree(
        self, sums: Array, tree: ReductionTree, reduction: Reduction = SUM
    ) -> None:
        if self.takes_device_buffers and is_capturing(sums):
            self.raise_together(refusal("all_reduce_by_tree", self.rank))
        words = f"{tree.replicas} replicas", dtype_name(sums), tuple(sums.shape[1:])
        with self._enter("all_reduce_by_tree", *words, *words_of_label(reduction.agreed)):
            operands = Operands(sums, reduction, tree=tree)
            self.transports.choose("all_reduce", operands).all_reduce(operands)

    def reduce(self, buffer: Array, root: int = 0, reduction: Reduction | str = SUM) -> None:
        reduction = as_reduction(reduction)
        root = index(root)  # a NumPy integer becomes an int
        self._call("reduce", Operands(buffer, reduction.plain, root=root), reduction.agreed)
        if self.rank == root:
            scale(buffer, reduction.scale)

    def reduce_scatter(self, buffer: Array, out: Array, reduction: Reduction | str = SUM) -> None:
        reduction = as_reduction(reduction)
        self._call("reduce_scatter", Operands(buffer, reduction.plain, out), reduction.agreed)
        scale(out, reduction.scale)

    def broadcast(self, buffer: Array, root: int = 0, *, label: str = "") -> None:
        self._call("broadcast", Operands(buffer, root=index(root)), ("", label, None))

    def all_gather(self, buffer: Array, *, label: str = "") -> list[Array]:
        return self._call("all_gather", Operands(buffer), ("", label, None))

    def all_gather_into(self, buffer: Array, out: Array, *, label: str = "") -> None:
        with self.raising_together():
            check_contiguous(buffer, out)
        self._call("all_gather_into", Operands(buffer, out=out), ("", label, None))

    def all_to_all(
        self,
        buffer: Array,
        out: Array,
        sent: Sequence[int],
        received: Sequence[int],
        *,
        label: str = "",
    ) -> None:
        with self.raising_together():
            check_contiguous(buffer, out)
        operands = Operands(buffer, out=out, sent=tuple(sent), received=tuple(received))
        self._call("all_to_all", operands, ("", label, None))
        if operands.starts is not None:
            with self.raising_together():
                check_arrived(operands.starts, operands.received, self.rank)

    def _call(
        self,
        call: str,
        operands: Operands,
        agreed: Agreed,
        cause: Exception | None = None,
        follows: bool = False,
    ) -> Any:
        """Agree with the other ranks on a call, and move its bytes, through slots if the call is small.

        Returns: a list of buffers for "all_gather"; None for other calls: their results are in the operands.

        Args:
            call: the name of the collective, such as "all_reduce".
            agreed: the reduction's operation, label and scale; ("", label, None) without a reduction.
            cause: the error that made this rank come to this call, for the other ranks' messages; None: no error.
            follows: True inside `following`: the ranks agree on the call only if it is small or on a device.
        """
        if self.takes_device_buffers and is_capturing(operands.buffer):
            self.raise_together(refusal(call, self.rank))
        signature, small, slot, meets = self._known.find(call, operands, agreed)
        contract = self.contract
        payload = None
        if small is not None:
            try:
                payload = small.payload(operands)
            except Exception as error:
                contract.raise_together(error)
        with contract.enter(signature, cause, slot, payload, follows and meets):
            if small is not None:
                result = small.take(contract.agreed & 1, operands, payload)
                if result is not TOO_LARGE:
                    return result
            return getattr(self.transports.choose(call, operands), call)(operands)

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
        self._known.forget(transport.takes_device_buffers)
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
