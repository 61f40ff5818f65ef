"""Communicators that move large buffers in a way of their own, and leave the rest to another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from mpistrat.arrays import Array
from mpistrat.communicators.communicator import Communicator
from mpistrat.options import CommunicationImplementation

if TYPE_CHECKING:
    from mpistrat.communicators.common_memory import CommonMemory, Part, View
    from mpistrat.communicators.reduction_tree import ReductionTree


class WrappingCommunicator(Communicator):
    """What is not a buffer goes through `inner`, a communicator over the same ranks."""

    def __init__(self, inner: Communicator) -> None:
        self.inner = inner
        self.rank, self.size = inner.rank, inner.size
        self.thread_multiple = inner.thread_multiple

    def start_all_reduce(self, buffer: Array, op: str = "sum") -> Callable[[], bool]:
        return self.inner.start_all_reduce(buffer, op)

    def all_reduce_by_tree(
        self, sums: Array, tree: ReductionTree, *, label: str = "", scale: float | None = None
    ) -> None:
        self.inner.all_reduce_by_tree(sums, tree, scale=scale)

    def broadcast_object(self, value: Any, root: int = 0, *, label: str = "") -> Any:
        return self.inner.broadcast_object(value, root)

    def all_gather_object(self, value: Any, *, label: str = "") -> list[Any]:
        return self.inner.all_gather_object(value)

    def barrier(self, *, label: str = "") -> None:
        self.inner.barrier()

    def split(self, color: int, key: int = 0) -> Communicator:
        return self.inner.split(color, key)

    def by(self, implementation: CommunicationImplementation) -> Communicator:
        own = (CommunicationImplementation.AUTO, CommunicationImplementation.NCCL)
        return self if implementation in own else self.inner.by(implementation)

    def abort(self, code: int) -> NoReturn:
        self.inner.abort(code)


class BesideHost(WrappingCommunicator):
    """Takes buffers in the memory of devices; those on the host, and the memory that ranks share, are `inner`'s."""

    takes_device_buffers = True

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner)
        self.has_window = inner.has_window

    @property
    def window_capacity(self) -> int:  # type: ignore[override]
        return self.inner.window_capacity

    def window_buffer(self, nbytes: int) -> Any:
        return self.inner.window_buffer(nbytes)

    def common_memory(
        self, nbytes: int, *, summed: bool = False
    ) -> tuple[CommonMemory | None, str]:
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
        self.inner.sum_into(memory, parts, view, scale)
