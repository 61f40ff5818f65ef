"""The interface to the memory that a communicator's ranks of a node share."""

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
    """Memory that ranks share. This class is the interface, and serves ranks that share none. Methods are collective.

    Attributes:
        window_capacity: bytes up to which `window_buffer` is not collective, because all ranks have a window so large.
    """

    window_capacity = 0

    def window_buffer(self, nbytes: int) -> np.ndarray | None:
        """Return `nbytes` uninitialized bytes of the window, where `all_reduce` need not copy; None if there are none.

        The window uses the memory again once nothing refers to it.

        Called by: all ranks, with equal `nbytes`. Some may get a buffer, and others None.
        """
        return None

    def common_memory(
        self, nbytes: int, *, summed: bool = False
    ) -> tuple[CommonMemory | None, str]:
        """Make memory with one copy on each node.

        Args:
            nbytes: bytes of whole pages (`common_memory.PAGE`), equal on all ranks.
            summed: whether the memory also has contributions, for `sum_into`.

        Returns: the memory and ""; None and the reason, on all ranks, if a rank cannot have it.
        """
        return None, "the ranks share no memory: bytes move by messages, as explain() says"

    def sum_into(
        self,
        memory: CommonMemory,
        parts: Sequence[ByteRange],
        view: View,
        reduction: Reduction = SUM,
    ) -> None:
        """Sum the contributions of all ranks to `parts` of `memory`, times the scale of `reduction`.

        Each rank sums its own slice.

        Args:
            memory: made by `common_memory(summed=True)`.
            view: this rank's view of `memory`. Pages that were written show the sum once they are renewed.
        """
        memory.sum(parts, view, reduction.scale)


NO_MEMORY = NodeMemory()


class CheckedMemory(NodeMemory):
    """The memory of a router: it checks and records the calls that are collective.

    Args:
        memory: the memory of the same ranks, without checks.
        enter: a function of the words that the ranks must agree on. It returns a context for the call.
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
