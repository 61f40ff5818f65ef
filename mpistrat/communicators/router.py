"""The communicator of several ranks: agrees on each call, then hands it to the transport that takes it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

from mpistrat.arrays import Array, dtype_name, is_on_accelerator, is_on_xla
from mpistrat.communicators.arithmetic import scale
from mpistrat.communicators.communicator import Communicator
from mpistrat.communicators.contract.call_signature import CallSignature, signature_of
from mpistrat.communicators.contract.unchecked import UNCHECKED, Unchecked
from mpistrat.communicators.node.memory import NO_MEMORY, CheckedMemory, NodeMemory
from mpistrat.communicators.node.slots import SharedSlots, Slot
from mpistrat.communicators.operand_checks import (
    check_exchange,
    check_gathered,
    check_parts,
    check_reduction,
    wrong_out,
)
from mpistrat.communicators.reduction import SUM, Reduction, as_reduction
from mpistrat.communicators.transports.mpi import MpiTransport
from mpistrat.communicators.transports.transport import Mover, Operands, Transport
from mpistrat.liveness.watch import CommunicatorWatch
from mpistrat.options import CommunicationImplementation

if TYPE_CHECKING:
    from mpistrat.communicators.reduction_tree import ReductionTree

# Kinds of all-reduces whose signatures and slots are kept; what is forgotten is made again.
_KNOWN_CALLS = 4096


@dataclass(frozen=True)
class Ways:
    """The ways by which the bytes of a group of ranks move.

    Attributes:
        mpi: takes the calls that no other transport takes, and objects.
        transports: are asked before `mpi`, in this order.
        memory: what the ranks of a node have in common.
        slots: for small sums; None where not all ranks share a node's memory.
        asked_for: the ways for an implementation that a program asks for; if it is missing, these are.
        of_part: makes the ways and the watch of some of the ranks, of their MPI and the name of their communicator.
            Collective over them. None: they have MPI alone.
    """

    mpi: MpiTransport
    transports: Sequence[Transport] = ()
    memory: NodeMemory = NO_MEMORY
    slots: SharedSlots | None = None
    asked_for: Mapping[CommunicationImplementation, Ways] = field(default_factory=dict)
    of_part: Callable[[MpiTransport, str], tuple[Ways, CommunicatorWatch]] | None = None

    def choose(self, call: str, operands: Operands) -> Mover:
        """What moves the bytes of a call. Collective."""
        for transport in self.transports:
            mover = transport.choose(call, operands)
            if mover is not None:
                return mover
        return self.mpi

    def explain(self) -> str:
        text = self.mpi.explain()
        for transport in reversed(self.transports):
            text = transport.explain(text)
        return text


class Router(Communicator):
    """Checks the contract of a call, records it, and hands it to the first transport that takes it.

    Args:
        ways: by which their bytes move.
        contract: checks and records calls. Without it, this is a group inside another.
        last_words: of the signature of each call.

    Attributes:
        mpi: as of `ways`.
    """

    def __init__(self, ways: Ways, contract: Unchecked = UNCHECKED, *last_words: str) -> None:
        self.ways, self.mpi, self.contract = ways, ways.mpi, contract
        self.rank, self.size = ways.mpi.rank, ways.mpi.size
        self.thread_multiple = ways.mpi.thread_multiple
        self.on_one_node = contract.watch is not None and contract.watch.peers is not None
        self.takes_device_buffers = any(t.takes_device_buffers for t in ways.transports)
        self._enter = _entering(contract, last_words)
        self.memory = CheckedMemory(ways.memory, self._enter)
        # Without an agreement there is nothing that small sums could travel with.
        self._sums = _KnownSums(None if contract.agreement is None else ways.slots, last_words)
        self._overridden: dict[CommunicationImplementation, _Overridden] = {}

    # Collectives

    def all_reduce(
        self,
        buffer: Array,
        reduction: Reduction | str = SUM,
        *,
        out: Array | None = None,
        cause: Exception | None = None,
    ) -> None:
        if reduction.__class__ is not Reduction:
            reduction = as_reduction(reduction)
        if out is not None and (out.shape != buffer.shape or out.dtype != buffer.dtype):
            self.raise_together(wrong_out(buffer, out))
        kind = _kind_of(buffer) if self.takes_device_buffers else None
        key = (reduction.agreed, buffer.dtype, buffer.shape, kind)
        known = self._sums.get(key)
        if known is None:
            with self.raising_together():
                known = self._sums.learn(key, buffer, reduction)
        signature, slot = known
        contract = self.contract
        if slot is None:
            with contract.enter(signature, cause):
                operands = Operands(buffer, reduction, out)
                self.ways.choose("all_reduce", operands).all_reduce(operands)
            return
        how = slot.how
        try:
            mine = how.elements(buffer)
            total = mine if out is None else how.elements(out)
        except Exception as error:
            contract.raise_together(error)
        with contract.enter(signature, cause, slot, mine):
            how.combine(slot.pieces[contract.calls & 1], total, reduction.scale)

    def all_reduce_by_tree(
        self, sums: Array, tree: ReductionTree, reduction: Reduction = SUM
    ) -> None:
        words = f"{tree.replicas} replicas", dtype_name(sums), tuple(sums.shape[1:])
        with self._enter("all_reduce_by_tree", *words, *_words_of(reduction)):
            operands = Operands(sums, reduction, tree=tree)
            self.ways.choose("all_reduce", operands).all_reduce(operands)

    def reduce(self, buffer: Array, root: int = 0, reduction: Reduction | str = SUM) -> None:
        reduction, root = as_reduction(reduction), index(root)
        with self.raising_together():
            check_reduction(reduction, buffer)
        words = reduction.op, root, *_words_of_buffer(buffer), *_words_of(reduction)
        with self._enter("reduce", *words):
            operands = Operands(buffer, reduction.plain, root=root)
            self.ways.choose("reduce", operands).reduce(operands)
            if self.rank == root:
                scale(buffer, reduction.scale)

    def reduce_scatter(self, buffer: Array, out: Array, reduction: Reduction | str = SUM) -> None:
        reduction = as_reduction(reduction)
        with self.raising_together():
            check_reduction(reduction, buffer)
            check_parts(buffer, out, self.size)
        words = reduction.op, *_words_of_buffer(buffer), *_words_of(reduction)
        with self._enter("reduce_scatter", *words):
            operands = Operands(buffer, reduction.plain, out)
            self.ways.choose("reduce_scatter", operands).reduce_scatter(operands)
            scale(out, reduction.scale)

    def broadcast(self, buffer: Array, root: int = 0, *, label: str = "") -> None:
        root = index(root)  # a NumPy integer would look different from a number
        with self._enter("broadcast", root, *_words_of_buffer(buffer), label):
            operands = Operands(buffer, root=root)
            self.ways.choose("broadcast", operands).broadcast(operands)

    def all_gather(self, buffer: Array, *, label: str = "") -> list[Array]:
        with self._enter("all_gather", _kind_of(buffer), f"{buffer.ndim} dimensions", label):
            operands = Operands(buffer)
            return self.ways.choose("all_gather", operands).all_gather(operands)

    def all_gather_into(self, buffer: Array, out: Array, *, label: str = "") -> None:
        with self.raising_together():
            check_gathered(buffer, out, self.size)
        with self._enter("all_gather_into", *_words_of_buffer(buffer), label):
            operands = Operands(buffer, out=out)
            self.ways.choose("all_gather_into", operands).all_gather_into(operands)

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
            check_exchange(buffer, out, sent, received, self.size)
        rows = f"rows of {tuple(buffer.shape[1:])}"
        with self._enter("all_to_all", _kind_of(buffer), rows, label):
            operands = Operands(buffer, out=out, sent=sent, received=received)
            self.ways.choose("all_to_all", operands).all_to_all(operands)

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
            ways, watch = Ways(mpi), None
            if self.ways.of_part is not None:
                ways, watch = self.ways.of_part(mpi, name)
            return Router(ways, self.contract.of_part(mpi, name, watch))

    # Ways

    def by(self, implementation: CommunicationImplementation) -> Router:
        if implementation is CommunicationImplementation.AUTO:
            return self
        if implementation not in self._overridden:
            self._overridden[implementation] = _Overridden(self, implementation)
        return self._overridden[implementation]

    def move_by(self, transport: Transport) -> None:
        """From now on `transport`, over the same ranks, is asked first. Collective."""
        self.ways = replace(self.ways, transports=[transport, *self.ways.transports])
        self.takes_device_buffers = transport.takes_device_buffers
        self._sums.clear()
        self._overridden.clear()

    def explain(self) -> str:
        return self.ways.explain()


class _Overridden(Router):
    """Moves bytes by `implementation`. Its calls are `router`'s, and are counted and recorded there."""

    def __init__(self, router: Router, implementation: CommunicationImplementation) -> None:
        ways = router.ways.asked_for.get(implementation, router.ways)
        super().__init__(ways, router.contract, f"by {implementation.name}")
        self._router, self._implementation = router, implementation

    def split(self, color: int, key: int = 0) -> Router:
        return self._router.split(color, key).by(self._implementation)

    def by(self, implementation: CommunicationImplementation) -> Router:
        auto = implementation is CommunicationImplementation.AUTO
        return self if auto else self._router.by(implementation)

    def explain(self) -> str:
        return f"implementation={self._implementation.name} was asked for:\n{super().explain()}"


class _KnownSum(NamedTuple):
    signature: CallSignature
    slot: Slot | None


class _KnownSums(dict[tuple[Any, ...], _KnownSum]):
    """The signatures and slots of the all-reduces that were called, by all in which calls may differ."""

    def __init__(self, slots: SharedSlots | None, last_words: tuple[str, ...]) -> None:
        super().__init__()
        self._slots, self._last_words = slots, last_words

    def learn(self, key: tuple[Any, ...], buffer: Array, reduction: Reduction) -> _KnownSum:
        """Remember an all-reduce. Raises: ValueError or TypeError if `buffer` cannot be reduced so."""
        check_reduction(reduction, buffer)
        words = reduction.op, *_words_of_buffer(buffer), *_words_of(reduction), *self._last_words
        slot = None
        if self._slots is not None and not is_on_accelerator(buffer):
            slot = self._slots.slot_for(buffer, reduction)
        if len(self) == _KNOWN_CALLS:
            self.clear()
        known = self[key] = _KnownSum(signature_of(("all_reduce", *words)), slot)
        return known


def _entering(
    contract: Unchecked, last_words: tuple[str, ...]
) -> Callable[..., contextlib.AbstractContextManager[None]]:
    """A function of the words of a call, whose result surrounds the call."""
    return lambda *words: contract.enter(signature_of(words + last_words))


def _kind_of(buffer: Array) -> str:
    """The dtype and the kind of device: ranks must agree on both, for they decide which way a buffer goes."""
    name = dtype_name(buffer)
    if not is_on_accelerator(buffer):
        return name
    return f"{name} on an XLA device" if is_on_xla(buffer) else f"{name} on a GPU"


def _words_of_buffer(buffer: Array) -> tuple[str, tuple[int, ...]]:
    return _kind_of(buffer), tuple(buffer.shape)


def _words_of(reduction: Reduction) -> tuple[str, ...]:
    """What the ranks must agree on of a reduction, but for the operation."""
    if reduction.scale is None:
        return (reduction.label,)
    return reduction.label, f"times {reduction.scale!r}"
