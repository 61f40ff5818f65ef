"""What a communicator's ranks of a node have in memory together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpistrat.arrays import dtype_name
from mpistrat.communicators.reduction import SUM, Reduction

if TYPE_CHECKING:
    from mpistrat.communicators.node.common_memory import ByteRange, CommonMemory, View


class NodeMemory:
    """The interface; ranks that share no memory have this one. Every method is collective.

    Attributes:
        window_capacity: up to so many bytes `window_buffer` is not collective, for all ranks have the window.
    """

    window_capacity = 0

    def window_buffer(self, nbytes: int) -> np.ndarray | None:
        """Memory in which `all_reduce` need not copy, `nbytes` uninitialized bytes; None where there is none.

        Equal `nbytes` on all ranks, some of which may get a buffer and others None. The memory is used again once
        nothing refers to it.
        """
        return None

    def common_memory(
        self, nbytes: int, *, summed: bool = False
    ) -> tuple[CommonMemory | None, str]:
        """Memory of which each node keeps one copy, or None on all ranks, and why.

        Args:
            nbytes: of whole pages (`common_memory.PAGE`), equal on all ranks.
            summed: with memory for contributions, which `sum_into` sums.
        """
        return None, "bytes move by messages alone, as explain() says"

    def sum_into(
        self,
        memory: CommonMemory,
        parts: Sequence[ByteRange],
        view: View,
        reduction: Reduction = SUM,
    ) -> None:
        """Sum the contributions of all ranks, times the scale, into `memory`, made by `common_memory(summed=True)`.

        Each rank sums its slice. `view` shows the sum in pages that were written when it is renewed.
        """
        memory.sum(parts, view, reduction.scale)


NO_MEMORY = NodeMemory()


class CheckedMemory(NodeMemory):
    """The memory of a router, whose collective calls are checked and recorded.

    Args:
        memory: of the same ranks.
        enter: gets the words that the ranks must agree on; its result surrounds the call.
    """

    def __init__(
        self, memory: NodeMemory, enter: Callable[..., contextlib.AbstractContextManager[None]]
    ) -> None:
        self._memory, self._enter = memory, enter

    @property
    def window_capacity(self) -> int:  # type: ignore[override]
        return self._memory.window_capacity

    def window_buffer(self, nbytes: int) -> np.ndarray | None:
        memory = self._memory
        if memory is NO_MEMORY or nbytes <= memory.window_capacity:
            return memory.window_buffer(nbytes)
        with self._enter("window_buffer", nbytes):
            return memory.window_buffer(nbytes)

    def common_memory(
        self, nbytes: int, *, summed: bool = False
    ) -> tuple[CommonMemory | None, str]:
        with self._enter("common_memory", nbytes, "summed" if summed else ""):
            return self._memory.common_memory(nbytes, summed=summed)

    def sum_into(
        self,
        memory: CommonMemory,
        parts: Sequence[ByteRange],
        view: View,
        reduction: Reduction = SUM,
    ) -> None:
        words = [
            f"{'add ' if part.added else ''}{dtype_name(part.like)} {part.first}:{part.end}"
            for part in parts
        ]
        with self._enter("sum_into", *words, reduction.label):
            super().sum_into(memory, parts, view, reduction)
