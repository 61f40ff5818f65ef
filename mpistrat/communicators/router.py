"""The communicator of several ranks: agrees on each call, then hands it to the transport that takes it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

import numpy as np

from mpistrat.arrays import Array, dtype_name, is_floating, is_on_accelerator, is_on_xla
from mpistrat.communicators.arithmetic import scale
from mpistrat.communicators.communicator import Communicator
from mpistrat.communicators.contract.call_signature import CallSignature, signature_of
from mpistrat.communicators.contract.contract import UNCHECKED, Unchecked
from mpistrat.communicators.node.slots import SharedSlots, Slot
from mpistrat.communicators.reduction import OPS, SUM, Reduction, as_reduction
from mpistrat.communicators.transports.compressed import CompressedTransport
from mpistrat.communicators.transports.mpi import MpiTransport
from mpistrat.communicators.transports.ring import RingTransport
from mpistrat.communicators.transports.transport import Mover, Transport
from mpistrat.liveness import job_end
from mpistrat.options import CommunicationImplementation

if TYPE_CHECKING:
    from mpistrat.communicators.node.common_memory import CommonMemory, Part, View
    from mpistrat.communicators.reduction_tree import ReductionTree

# All-reduces, by operands, whose signatures and slots are kept; what is forgotten is made again.
_KNOWN_CALLS = 4096


class NodeMemory(Protocol):
    """What gives the ranks of a node memory in common; as of `Communicator`, whose calls these are."""

    @property
    def window_capacity(self) -> int: ...

    def window_buffer(self, nbytes: int) -> np.ndarray | None: ...

    def common_memory(
        self, nbytes: int, *, summed: bool = False
    ) -> tuple[CommonMemory | None, str]: ...

    def sum_into(
        self, memory: CommonMemory, parts: Sequence[Part], view: View, scale: float | None
    ) -> None: ...


class Ways(NamedTuple):
    """By which ways the bytes of one group of ranks move.

    Attributes:
        transports: asked in this order; the last is MPI's, which takes everything.
        memory: that the ranks of a node share; None where they share none.
        slots: for small sums; None where not all ranks share a node's memory.
    """

    transports: Sequence[Transport]
    memory: NodeMemory | None = None
    slots: SharedSlots | None = None


class _Call(NamedTuple):
    """What is known of all-reduces of one kind."""

    signature: CallSignature
    slot: Slot | None


class Router(Communicator):
    """Checks the contract of a call, records it, and hands it to the first transport that takes it.

    Args:
        ways: of the ranks, or the transports alone.
        contract: what the ranks agree on, and where that is recorded. Without one, this is a group inside another.

    Attributes:
        mpi: what moves what is no buffer.
        transports: as given; the first that takes a call moves its bytes.
        splits: the communicators that were made of this one.
    """

    def __init__(self, ways: Ways | Sequence[Transport], contract: Unchecked = UNCHECKED) -> None:
        ways = ways if isinstance(ways, Ways) else Ways(ways)
        self.transports = list(ways.transports)
        assert isinstance(self.transports[-1], MpiTransport)
        self.mpi = self.transports[-1]
        self.rank, self.size = self.mpi.rank, self.mpi.size
        self.thread_multiple = self.mpi.thread_multiple
        self.contract = contract
        self.timeline, self.watch = contract.timeline, contract.watch
        self.on_one_node = self.watch is not None and self.watch.peers is not None
        self.takes_device_buffers = self.transports[0].takes_device_buffers
        self.splits: list[Router] = []
        self._memory = ways.memory
        # Without an agreement there is nothing that small sums could travel with.
        self._slots = None if contract.agreement is None else ways.slots
        self._calls: dict[tuple[Any, ...], _Call] = {}
        self._overridden: dict[CommunicationImplementation, _Overridden] = {}
        self._last_words: tuple[str, ...] = ()  # of each signature

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
            self._refuse_out(buffer, out)
        kind = self._kind(buffer) if self.takes_device_buffers else None
        key = (reduction.agreed, buffer.dtype, buffer.shape, kind)
        signature, slot = self._calls.get(key) or self._learn(key, buffer, reduction)
        contract = self.contract
        if slot is None:
            with contract.enter(signature, cause):
                transport = self._transport("all_reduce", buffer, reduction, out)
                transport.all_reduce(buffer, reduction, out)
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
        words = (
            "all_reduce_by_tree",
            f"{tree.replicas} replicas",
            dtype_name(sums),
            tuple(sums.shape[1:]),
            *_words_of(reduction),
        )
        with self._enter(*words):
            transport = self._transport("all_reduce", sums, reduction, tree=tree)
            transport.all_reduce(sums, reduction, tree=tree)

    def reduce(self, buffer: Array, root: int = 0, reduction: Reduction | str = SUM) -> None:
        reduction, root = self._checked(as_reduction(reduction), buffer), index(root)
        kind, shape, plain = self._kind(buffer), tuple(buffer.shape), reduction.plain
        with self._enter("reduce", reduction.op, root, kind, shape, *_words_of(reduction)):
            self._transport("reduce", buffer, plain).reduce(buffer, root, plain)
            if self.rank == root:
                scale(buffer, reduction.scale)

    def reduce_scatter(self, buffer: Array, out: Array, reduction: Reduction | str = SUM) -> None:
        reduction = self._checked(as_reduction(reduction), buffer)
        with self.raising_together():
            _check_parts(buffer, out, self.size)
        kind, shape, plain = self._kind(buffer), tuple(buffer.shape), reduction.plain
        with self._enter("reduce_scatter", reduction.op, kind, shape, *_words_of(reduction)):
            self._transport("reduce_scatter", buffer, plain).reduce_scatter(buffer, out, plain)
            scale(out, reduction.scale)

    def broadcast(self, buffer: Array, root: int = 0, *, label: str = "") -> None:
        root = index(root)  # a NumPy integer would be told as another
        with self._enter("broadcast", root, self._kind(buffer), tuple(buffer.shape), label):
            self._transport("broadcast", buffer).broadcast(buffer, root)

    def all_gather(self, buffer: Array, *, label: str = "") -> list[Array]:
        with self._enter("all_gather", self._kind(buffer), f"{buffer.ndim} dimensions", label):
            return self._transport("all_gather", buffer).all_gather(buffer)

    def broadcast_object(self, value: Any, root: int = 0, *, label: str = "") -> Any:
        root = index(root)
        with self._enter("broadcast_object", root, label):
            return self.mpi.broadcast_object(value, root)

    def all_gather_object(self, value: Any, *, label: str = "") -> list[Any]:
        with self._enter("all_gather_object", label):
            return self.mpi.all_gather_object(value)

    def barrier(self, *, label: str = "") -> None:
        with self._enter("barrier", label):
            self.mpi.barrier()

    def split(self, color: int, key: int = 0) -> Router:
        with self._enter("split"):
            mpi = self.mpi.split(color, key)
            ways, contract = self.contract.of_part(mpi, f"{len(self.splits)}:{color}")
        part = Router(ways or [mpi], contract)
        self.splits.append(part)
        return part

    # Memory in common

    @property
    def window_capacity(self) -> int:  # type: ignore[override]
        return 0 if self._memory is None else self._memory.window_capacity

    def window_buffer(self, nbytes: int) -> np.ndarray | None:
        memory = self._memory
        if memory is None:
            return None
        if nbytes <= memory.window_capacity:
            return memory.window_buffer(nbytes)
        with self._enter("window_buffer", nbytes):
            return memory.window_buffer(nbytes)

    def common_memory(
        self, nbytes: int, *, summed: bool = False
    ) -> tuple[CommonMemory | None, str]:
        with self._enter("common_memory", nbytes, "summed" if summed else ""):
            if self._memory is None:
                return super().common_memory(nbytes, summed=summed)
            return self._memory.common_memory(nbytes, summed=summed)

    def sum_into(
        self, memory: CommonMemory, parts: Sequence[Part], view: View, reduction: Reduction = SUM
    ) -> None:
        assert self._memory is not None, "what has given the memory"
        told = [
            f"{'add ' if part.added else ''}{dtype_name(part.like)} {part.first}:{part.end}"
            for part in parts
        ]
        with self._enter("sum_into", *told, reduction.label):
            self._memory.sum_into(memory, parts, view, reduction.scale)

    # Ways

    def by(self, implementation: CommunicationImplementation) -> Router:
        if implementation is CommunicationImplementation.AUTO:
            return self
        if implementation not in self._overridden:
            self._overridden[implementation] = _Overridden(self, implementation)
        return self._overridden[implementation]

    def move_by(self, transport: Transport) -> None:
        """From now on `transport`, over the same ranks, is asked first. Collective."""
        self.transports.insert(0, transport)
        self.takes_device_buffers = transport.takes_device_buffers
        self._calls.clear()
        self._overridden.clear()

    def explain(self) -> str:
        told = ""
        for transport in reversed(self.transports):
            told = transport.explain(told)
        return told

    def _transport(
        self,
        call: str,
        buffer: Array,
        reduction: Reduction = SUM,
        out: Array | None = None,
        tree: ReductionTree | None = None,
    ) -> Mover:
        """What moves the bytes of a call. Collective."""
        for transport in self.transports:
            chosen = transport.choose(call, buffer, reduction, out, tree)
            if chosen is not None:
                return chosen
        raise AssertionError("the last transport takes every call")

    # The contract

    def raise_together(self, error: Exception) -> NoReturn:
        self.contract.raise_together(error)

    def has_lost_a_rank(self) -> bool:
        group = None if self.watch is None else self.watch.revocable_group
        return group is not None and group.lost

    def seconds_waited(self, last: int = 60) -> float:
        return 0.0 if self.watch is None else self.watch.record.seconds_waited(last)

    def abort(self, code: int) -> NoReturn:
        job_end.abort(code)

    def _enter(self, *words: Any) -> contextlib.AbstractContextManager[None]:
        if self._last_words:
            words += self._last_words
        return self.contract.enter(signature_of(words))

    def _learn(self, key: tuple[Any, ...], buffer: Array, reduction: Reduction) -> _Call:
        """The signature of an all-reduce, and the slot that it takes; kept by `key`."""
        self._checked(reduction, buffer)
        words = (
            "all_reduce",
            reduction.op,
            self._kind(buffer),
            tuple(buffer.shape),
            *_words_of(reduction),
            *self._last_words,
        )
        host = not (self.takes_device_buffers and is_on_accelerator(buffer))
        slot = self._slots.slot_for(buffer, reduction) if self._slots and host else None
        if len(self._calls) == _KNOWN_CALLS:
            self._calls.clear()
        known = self._calls[key] = _Call(signature_of(words), slot)
        return known

    def _checked(self, reduction: Reduction, buffer: Array) -> Reduction:
        """`reduction`, if `buffer` can be reduced so. Raises: ValueError, on all ranks."""
        if reduction.op not in OPS:
            self.raise_together(ValueError(f"op must be one of {OPS}, got {reduction.op!r}"))
        if reduction.scale is not None and not (
            is_floating(buffer) or dtype_name(buffer).startswith("complex")
        ):
            self.raise_together(
                ValueError(f"scale is for floating point, got {dtype_name(buffer)}")
            )
        return reduction

    def _refuse_out(self, buffer: Array, out: Array) -> NoReturn:
        self.raise_together(
            ValueError(
                f"out must be {dtype_name(buffer)} of {tuple(buffer.shape)} as the buffer, got {dtype_name(out)} "
                f"of {tuple(out.shape)}"
            )
        )

    def _kind(self, buffer: Array) -> str:
        """What buffers must be equal in on all ranks: those on devices may go another way."""
        name = dtype_name(buffer)
        if not self.takes_device_buffers or not is_on_accelerator(buffer):
            return name
        return f"{name} on an XLA device" if is_on_xla(buffer) else f"{name} on a GPU"


class _Overridden(Router):
    """Moves bytes by `implementation`. Its calls are `router`'s, and are counted and recorded there."""

    def __init__(self, router: Router, implementation: CommunicationImplementation) -> None:
        super().__init__(_ways_by(implementation, router), router.contract)
        self._router, self._implementation = router, implementation
        self._last_words = (f"by {implementation.name}",)

    def split(self, color: int, key: int = 0) -> Router:
        return self._router.split(color, key).by(self._implementation)

    def by(self, implementation: CommunicationImplementation) -> Router:
        auto = implementation is CommunicationImplementation.AUTO
        return self if auto else self._router.by(implementation)

    def explain(self) -> str:
        return f"implementation={self._implementation.name} was asked for:\n{super().explain()}"


def _ways_by(implementation: CommunicationImplementation, router: Router) -> Ways:
    """The ways of `router`'s ranks by what was asked for. NCCL is taken wherever it can be, without being asked for."""
    mpi = router.mpi
    if implementation is CommunicationImplementation.NCCL:
        return Ways(router.transports, router._memory, router._slots)
    messages: list[Transport] = [mpi]
    if implementation is CommunicationImplementation.RING:
        messages = [RingTransport(mpi), mpi]
    if router.on_one_node:  # where nothing is compressed
        return Ways(messages)
    return Ways([CompressedTransport(Router([mpi])), *messages])


def _words_of(reduction: Reduction) -> tuple[str, ...]:
    """What the ranks must agree on, but for the operation."""
    if reduction.scale is None:
        return (reduction.label,)
    return reduction.label, f"times {reduction.scale!r}"


def _check_parts(buffer: Array, out: Array, size: int) -> None:
    expected = (size * out.shape[0], *out.shape[1:]) if out.ndim else ()
    if tuple(buffer.shape) != expected or dtype_name(buffer) != dtype_name(out):
        raise ValueError(
            f"reduce_scatter over {size} ranks into {dtype_name(out)} of {tuple(out.shape)} needs a buffer of {size} "
            f"times as many rows, got {dtype_name(buffer)} of {tuple(buffer.shape)}"
        )
