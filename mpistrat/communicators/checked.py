"""The contract check: before bytes move, the ranks agree on what moves."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from mpistrat.arrays import Array, dtype_name, is_floating, is_on_accelerator, is_on_xla
from mpistrat.communicators.agreement import Agreement, BoardAgreement, MessageAgreement
from mpistrat.communicators.call_signature import describe, explain_difference, recorded
from mpistrat.communicators.call_site import call_site, outside
from mpistrat.communicators.communicator import (
    REDUCTIONS,
    Communicator,
    Wire,
    mark_raised_by_all,
)
from mpistrat.communicators.reduction_tree import ReductionTree
from mpistrat.communicators.station import Station
from mpistrat.communicators.waiting import raise_if_stalled
from mpistrat.errors import CollectiveMismatchError
from mpistrat.flight_recorder.record import ABORT
from mpistrat.options import CommunicationImplementation

if TYPE_CHECKING:
    from mpistrat.communicators.common_memory import CommonMemory, Part, View


class CheckedCommunicator(Communicator):
    """Wraps a communicator: records its calls, and raises CollectiveMismatchError on all ranks when they differ.

    Each call is described by a signature (operation, dtype, shape, label), whose digest the ranks
    compare: on a board in shared memory if all of them are on one node, else by a message. Only if they
    differ are the signatures themselves exchanged.

    Args:
        name: the same on all ranks of the group, and different from all other groups' names.
        station: where the calls are recorded; None is memory that nobody else sees.
        check: "always", or "never": then ranks that differ are not noticed before the bytes move.

    Attributes:
        agreement: how the ranks compare their calls; None with check="never".
        calls: how many collectives this rank has entered.
        waiting_in: the signature of the collective this rank is inside of, else None. Read by the
            watcher of `job_end` on another thread, as is `called_at`: it must not look at frames that run on.
        called_at: where the program called the last collective: "train.py:33 in main".
        splits: the communicators that were made of this one.
    """

    def __init__(
        self, inner: Communicator, name: str, station: Station | None = None, check: str = "always"
    ) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.size = inner.size
        self.thread_multiple = inner.thread_multiple
        self.name = name
        self.station = station or Station()
        self.on_one_node = self.station.peers is not None
        self.check = check
        self.calls = 0
        self.waiting_in: tuple[Any, ...] | None = None
        self.splits: list[CheckedCommunicator] = []
        self._record = self.station.record
        self._board = self.station.board
        self.agreement: Agreement | None = None
        if check == "always":
            self.agreement = (
                MessageAgreement(inner, self.station)
                if self.station.peers is None
                else BoardAgreement(self.station)
            )
        self._inside = _Inside(self)
        self._called_at: tuple[CodeType, int] | None = None
        self._thread = 0  # the one that is, or was last, inside a collective
        self._forked = False
        self._overridden: dict[CommunicationImplementation, CheckedCommunicator] = {}
        self._abandoned: BaseException | None = None  # what this rank left its last call for
        os.register_at_fork(after_in_child=_Forked(self))

    def all_reduce(
        self,
        buffer: Array,
        op: str = "sum",
        *,
        out: Array | None = None,
        label: str = "",
        error: Exception | None = None,
        scale: float | None = None,
        wire: Wire | None = None,
    ) -> None:
        if op not in REDUCTIONS:
            self.raise_together(ValueError(f"op must be one of {REDUCTIONS}, got {op!r}"))
        if out is not None and (out.shape != buffer.shape or out.dtype != buffer.dtype):
            self.raise_together(
                ValueError(
                    f"out must be {dtype_name(buffer)} of {tuple(buffer.shape)} as the buffer, got {dtype_name(out)} "
                    f"of {tuple(out.shape)}"
                )
            )
        if scale is not None and not (
            is_floating(buffer) or dtype_name(buffer).startswith("complex")
        ):
            self.raise_together(
                ValueError(f"scale is for floating point, got {dtype_name(buffer)}")
            )
        signature: tuple[Any, ...] = (
            "all_reduce",
            op,
            self._kind(buffer),
            tuple(buffer.shape),
            label,
        )
        if scale is not None:
            signature += (f"times {scale!r}",)
        with self._enter(signature, cause=error):
            if self.on_one_node:
                wire = None  # messages within it are copies in memory, too
            self.inner.all_reduce(buffer, op, out=out, scale=scale, wire=wire)

    def all_reduce_by_tree(
        self, sums: Array, tree: ReductionTree, *, label: str = "", scale: float | None = None
    ) -> None:
        signature: tuple[Any, ...] = (
            "all_reduce_by_tree",
            f"{tree.replicas} replicas",
            dtype_name(sums),
            tuple(sums.shape[1:]),
            label,
        )
        if scale is not None:
            signature += (f"times {scale!r}",)
        with self._enter(signature):
            self.inner.all_reduce_by_tree(sums, tree, scale=scale)

    def window_buffer(self, nbytes: int) -> np.ndarray | None:
        if not self.inner.has_window:
            return None
        if nbytes <= self.window_capacity:
            return self.inner.window_buffer(nbytes)
        with self._enter(("window_buffer", nbytes)):
            return self.inner.window_buffer(nbytes)

    @property
    def window_capacity(self) -> int:  # type: ignore[override]
        return self.inner.window_capacity

    def move_by(self, inner: Communicator) -> None:
        """From now on bytes move by `inner`, over the same ranks. Collective."""
        self.inner = inner
        self._overridden.clear()

    def common_memory(
        self, nbytes: int, *, summed: bool = False
    ) -> tuple[CommonMemory | None, str]:
        with self._enter(("common_memory", nbytes, "summed" if summed else "")):
            return self.inner.common_memory(nbytes, summed=summed)

    def sum_into(
        self,
        memory: CommonMemory,
        parts: Sequence[Part],
        view: View,
        scale: float | None = None,
        *,
        label: str = "",
    ) -> None:
        told = [
            f"{'add ' if part.added else ''}{dtype_name(part.like)} {part.first}:{part.end}"
            for part in parts
        ]
        with self._enter(("sum_into", *told, label)):
            self.inner.sum_into(memory, parts, view, scale)

    def reduce(self, buffer: Array, root: int = 0, op: str = "sum", *, label: str = "") -> None:
        with self._enter(("reduce", op, root, self._kind(buffer), tuple(buffer.shape), label)):
            self.inner.reduce(buffer, root, op)

    def reduce_scatter(
        self, buffer: Array, out: Array, op: str = "sum", *, label: str = ""
    ) -> None:
        with self.raising_together():
            _check_parts(buffer, out, self.size)
        with self._enter(("reduce_scatter", op, self._kind(buffer), tuple(buffer.shape), label)):
            self.inner.reduce_scatter(buffer, out, op)

    def broadcast(self, buffer: Array, root: int = 0, *, label: str = "") -> None:
        with self._enter(("broadcast", root, self._kind(buffer), tuple(buffer.shape), label)):
            self.inner.broadcast(buffer, root)

    def all_gather(self, buffer: Array, *, label: str = "") -> list[Array]:
        with self._enter(("all_gather", self._kind(buffer), f"{buffer.ndim} dimensions", label)):
            return self.inner.all_gather(buffer)

    def broadcast_object(self, value: Any, root: int = 0, *, label: str = "") -> Any:
        with self._enter(("broadcast_object", root, label)):
            return self.inner.broadcast_object(value, root)

    def all_gather_object(self, value: Any, *, label: str = "") -> list[Any]:
        with self._enter(("all_gather_object", label)):
            return self.inner.all_gather_object(value)

    def barrier(self, *, label: str = "") -> None:
        with self._enter(("barrier", label)):
            self.inner.barrier()

    def split(self, color: int, key: int = 0) -> CheckedCommunicator:
        with self._enter(("split",)):
            inner = self.inner.split(color, key)
            name = f"{self.name}/{len(self.splits)}:{color}"
            station = None
            if self.station.of_part is not None:
                inner, station = self.station.of_part(inner, name)
        part = self._part(inner, name, station)
        self.splits.append(part)
        return part

    def _part(self, inner: Communicator, name: str, station: Station | None) -> CheckedCommunicator:
        return CheckedCommunicator(inner, name, station, self.check)

    def by(self, implementation: CommunicationImplementation) -> CheckedCommunicator:
        if implementation is CommunicationImplementation.AUTO:
            return self
        if implementation not in self._overridden:
            self._overridden[implementation] = _Overridden(self, implementation)
        return self._overridden[implementation]

    def explain(self) -> str:
        return self.inner.explain()

    def abort(self, code: int) -> NoReturn:
        self.inner.abort(code)

    def has_lost_a_rank(self) -> bool:
        family = self.station.family
        return family is not None and family.lost

    def seconds_waited(self, last: int = 60) -> float:
        return self._record.seconds_waited(last)

    @property
    def takes_device_buffers(self) -> bool:  # type: ignore[override]
        return self.inner.takes_device_buffers

    @property
    def called_at(self) -> str:
        if self._called_at is None:
            return "an unknown place"
        code, line = self._called_at
        return f"{code.co_filename}:{line} in {code.co_name}"

    def _kind(self, buffer: Array) -> str:
        """What buffers must be equal in on all ranks: those on devices may go another way."""
        name = dtype_name(buffer)
        if not self.takes_device_buffers or not is_on_accelerator(buffer):
            return name
        return f"{name} on an XLA device" if is_on_xla(buffer) else f"{name} on a GPU"

    def raise_together(self, error: Exception) -> NoReturn:
        """Raise `error` here; the ranks that wait in a collective get CollectiveMismatchError.

        If all ranks come here with errors of the same class, each raises its own.
        """
        with self._enter(("raise", type(error).__name__), cause=error):
            mark_raised_by_all(error)
            raise error

    def _enter(self, signature: tuple[Any, ...], cause: Exception | None = None) -> _Inside:
        """Return once all ranks have entered the same call; it lasts until the result's block ends."""
        if self._forked:
            raise RuntimeError(
                f"{describe(signature)} was called in a forked child of rank {self.rank}; MPI belongs to "
                "the parent: return what the child computed, and call it there"
            )
        if self._abandoned is not None:
            raise RuntimeError(
                f"rank {self.rank}: {describe(signature)} cannot be called any more: this rank left its collective "
                f"number {self.calls} while others may still be in it, for {type(self._abandoned).__name__}. Save what "
                "you need and end the program"
            ) from self._abandoned
        thread = threading.get_ident()
        if self.waiting_in is not None and self._thread != thread:
            raise RuntimeError(
                f"rank {self.rank}: {describe(signature)} was called on a second thread while another is in "
                f"{describe(self.waiting_in)}; the ranks could not know which is which. Call collectives on "
                "one thread, or make a strategy of its own (comm=) for each"
            )
        self._thread = thread
        self.calls = calls = self.calls + 1
        self.waiting_in = signature
        frame = outside(sys._getframe(2))
        code = frame.f_code
        digest, text, call_bytes = recorded(
            signature, code.co_filename, code.co_name, frame.f_lineno
        )
        self._called_at = code, frame.f_lineno
        self._record.enter(self._board, calls, text, call_bytes)
        try:
            agreed = self.agreement is None or self.agreement.agree(calls, digest)
            if self._record.words[ABORT]:
                raise_if_stalled(self.station)  # the others may have left this call for it
            if self.agreement is not None:
                self._record.waited(self._board)
            if not agreed:
                told = signature if cause is None else (*signature, str(cause))
                everyone = self.inner.all_gather_object((told, call_site(frame)))
                raise CollectiveMismatchError(explain_difference(everyone, self.rank)) from cause
        except BaseException as error:
            if not isinstance(error, CollectiveMismatchError):
                self._abandoned = error
            self._inside.leave()
            raise
        return self._inside


class _Overridden(CheckedCommunicator):
    """Its calls are those of `checked`, and are counted and recorded there; their bytes move by `implementation`."""

    def __init__(
        self, checked: CheckedCommunicator, implementation: CommunicationImplementation
    ) -> None:
        super().__init__(
            checked.inner.by(implementation), checked.name, checked.station, check="never"
        )
        self.check = checked.check
        self.timeline = checked.timeline
        self._checked, self._implementation = checked, implementation

    def _enter(self, signature: tuple[Any, ...], cause: Exception | None = None) -> _Inside:
        if signature[0] != "raise":
            signature += (f"by {self._implementation.name}",)
        return self._checked._enter(signature, cause)

    def split(self, color: int, key: int = 0) -> CheckedCommunicator:
        return self._checked.split(color, key).by(self._implementation)

    def by(self, implementation: CommunicationImplementation) -> CheckedCommunicator:
        auto = implementation is CommunicationImplementation.AUTO
        return self if auto else self._checked.by(implementation)

    def explain(self) -> str:
        return f"implementation={self._implementation.name} was asked for:\n{self.inner.explain()}"


class _Inside:
    """The time between a rank's entering and its leaving a call."""

    __slots__ = ("_board", "_communicator", "_record")

    def __init__(self, communicator: CheckedCommunicator) -> None:
        self._communicator = communicator
        self._record = communicator.station.record
        self._board = communicator.station.board

    def __enter__(self) -> None:
        pass

    def leave(self, *_: object) -> None:
        self._communicator.waiting_in = None
        self._record.leave(self._board)

    __exit__ = leave


class _Forked:
    """Marks a communicator in a forked child, without keeping it alive in the parent."""

    def __init__(self, communicator: CheckedCommunicator) -> None:
        self._communicator = weakref.ref(communicator)

    def __call__(self) -> None:
        communicator = self._communicator()
        if communicator is not None:
            communicator._forked = True


def _check_parts(buffer: Array, out: Array, size: int) -> None:
    expected = (size * out.shape[0], *out.shape[1:]) if out.ndim else ()
    if tuple(buffer.shape) != expected or dtype_name(buffer) != dtype_name(out):
        raise ValueError(
            f"reduce_scatter over {size} ranks into {dtype_name(out)} of {tuple(out.shape)} needs a buffer of {size} "
            f"times as many rows, got {dtype_name(buffer)} of {tuple(buffer.shape)}"
        )
