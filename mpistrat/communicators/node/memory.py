"""`NodeMemory`: the interface to the memory that the ranks of a communicator share on each node."""

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
    """Memory that the ranks of a node share. Its methods are collective.

    This class is the interface; an object of the class itself (`NO_MEMORY`) serves ranks that share no memory.

    Attributes:
        window_capacity: bytes of the largest buffer of the present window. Up to this size, `window_buffer` is not
            collective.
    """

    window_capacity = 0

    def window_buffer(self, nbytes: int) -> np.ndarray | None:
        """Return a buffer of `nbytes` uninitialized bytes in the window.

        The window is memory that a node's ranks share: `all_reduce` combines buffers there without copying them. The
        window uses the memory again once nothing refers to the buffer. If `nbytes` exceeds `window_capacity`, a larger
        window is made.

        Called by: all ranks, with equal `nbytes`.

        Returns: None if all buffers are in use, if `nbytes` is too small for the window to gain time, if the limit of
            shared memory allows no larger window, or without shared memory. It may be None on some ranks only.
        """
        return None

    def common_memory(
        self, nbytes: int, *, summed: bool = False
    ) -> tuple[CommonMemory | None, str]:
        """Make memory with one copy on each node, shared by the node's ranks, see `common_memory`.

        Args:
            nbytes: bytes of whole pages (`common_memory.PAGE`), equal on all ranks.
            summed: whether each rank also gets memory for its contribution to sums, for `sum_into`.

        Returns: the memory and ""; on all ranks None and the reason if any rank cannot have it.
        """
        return None, "the ranks share no memory: bytes move by messages, as explain() says"

    def sum_into(
        self,
        memory: CommonMemory,
        parts: Sequence[ByteRange],
        view: View,
        reduction: Reduction = SUM,
    ) -> None:
        """Sum `parts` of all ranks' contributions into the common copy of `memory`, times the scale of `reduction`.

        Called by: `SharedParameters`, for gradients.

        Args:
            memory: made by `common_memory(summed=True)`.
            parts: the bytes to sum; the same on all ranks.
            view: this rank's view of `memory`. Pages that this rank has written show the sum only after `View.renew`.
        """
        memory.sum(parts, view, reduction.scale)


NO_MEMORY = NodeMemory()


class CheckedMemory(NodeMemory):
    """The memory of a router: its collective calls are checked and recorded like the router's other calls.

    Args:
        memory: the memory that the router's ranks share, without checks.
        enter: a function of the words that the ranks must agree on. It returns a context for the call.
    """

    def __init__(
        self, memory: NodeMemory, enter: Callable[..., contextlib.AbstractContextManager[None]]
    ) -> None:
        self._memory = memory
        self._enter = enter

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
        words = []
        for part in parts:
            word = f"{dtype_name(part.like)} {part.first}:{part.end}"
            if part.added:
                word = f"add {word}"
            words.append(word)
        with self._enter("sum_into", *words, reduction.label):
            super().sum_into(memory, parts, view, reduction)
