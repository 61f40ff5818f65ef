"""Variables with one copy for each node: its ranks keep the copy in memory that they share, and update it together."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from mpistrat import arrays
from mpistrat.arrays import Array
from mpistrat.communicators import Communicator
from mpistrat.communicators.host_views import as_buffer_of, view_of
from mpistrat.communicators.node.common_memory import PAGE, CommonMemory
from mpistrat.indexed_slices import IndexedSlices
from mpistrat.variables.updates import fitting_operand, updated
from mpistrat.variables.variable import PlainVariable


def variable_of_node(
    communicator: Communicator, value: Array, trainable: bool, name: str, *how: Any
) -> PlainVariable:
    """Make a `NodeVariable`, with one copy for the node; if that is not possible, a `PlainVariable` on each rank.

    A single rank, an array on a GPU and an empty array give a `PlainVariable`. So does a node whose ranks cannot share
    memory; then rank 0 warns, with the reason.

    Called by: every rank of the node, in the same order.
    Args:
        value: initial value, equal on all ranks.
        how: further arguments of `PlainVariable`.
    """
    memory = None
    why = ""
    nbytes = arrays.num_elements(value) * arrays.itemsize(value)
    if communicator.size > 1 and nbytes and not arrays.is_on_gpu(value):
        pages = -(-nbytes // PAGE)
        memory, why = communicator.memory.common_memory(pages * PAGE)
    if memory is None:
        if why and communicator.rank == 0:
            warnings.warn(
                f"each rank keeps a copy of variable {name!r}: {why}", RuntimeWarning, stacklevel=2
            )
        return PlainVariable(value, trainable, name, *how)
    return NodeVariable(communicator, memory, value, trainable, name, *how)


class NodeVariable(PlainVariable):
    """A component of a variable in memory that the ranks of a node share.

    A read returns an array in that memory, so an array that was read before an update shows the new value afterwards.
    All ranks make each update together, with equal operands, and each rank computes its part of the new value.

    Args:
        memory: common memory of these ranks, at least as large as `value`.
        value: initial value of one element or more, on the CPU, equal on all ranks.
        how: further arguments of `PlainVariable`.
    """

    def __init__(
        self, communicator: Communicator, memory: CommonMemory, value: Array, *how: Any
    ) -> None:
        self._communicator = communicator
        self._view = memory.view()
        self._common = _as(memory.shared, value)  # updates are written here, and all ranks see them
        super().__init__(value, *how)

    def _kept(self, value: Array) -> Array:
        part = self._part_of(arrays.num_elements(value))
        numbers = arrays.detach(value).reshape(-1)
        self._common.reshape(-1)[part] = numbers[part]
        self._communicator.barrier(label="first value of a variable of the node")
        return _as(self._view.memory, value)

    def _update(self, method: str, operand: Any) -> Array:
        """Update the variable: this rank writes its part of the new value, and waits for the other ranks.

        Called by: every rank of the node, with an equal operand.
        Returns: an array of the whole new value, in the shared memory.
        Raises: on all ranks, before anything is written, the errors of `fitting_operand`.
        """
        with self._communicator.raising_together():
            operand = fitting_operand(method, self._array, operand, self.name)
            if isinstance(operand, IndexedSlices):
                part = self._part_of(self._array.shape[0])
                indices = arrays.to_numpy(operand.indices).astype(np.int64)
                are_inside = (indices >= part.start) & (indices < part.stop)
                (inside,) = np.nonzero(are_inside)
                rows = arrays.detach_read(operand.values)[inside]
                operand = IndexedSlices(rows, indices[inside] - part.start)
                target = self._common[part]
            else:
                part = self._part_of(arrays.num_elements(self._array))
                operand = operand.reshape(-1)[part]
                target = self._common.reshape(-1)[part]
            # The new value is computed in an array of its own, because the operand may be a view of the variable's
            # memory, such as its reverse.
            value = updated(method, target, operand, self.name)
        self._communicator.barrier(label=f"{method} to {self.name!r}")  # then all ranks have read
        target[...] = value
        # After this barrier all ranks have written.
        self._communicator.barrier(label=f"end of {method} to {self.name!r}")
        # Pages that the program has written to, in arrays that it read, are private copies. They are dropped.
        self._view.renew(self._view.written())
        return self._array

    def _part_of(self, length: int) -> slice:
        """Return the slice of `length` elements or rows that this rank computes; it may be empty."""
        rank = self._communicator.rank
        size = self._communicator.size
        first = length * rank // size
        end = length * (rank + 1) // size
        return slice(first, end)


def _as(memory: np.ndarray, like: Array) -> Array:
    """Return an array of the library, dtype and shape of `like` that uses the first bytes of `memory`, uint8[n]."""
    nbytes = arrays.num_elements(like) * arrays.itemsize(like)
    numbers = memory[:nbytes].view(view_of(like).dtype)
    return as_buffer_of(like, numbers.reshape(tuple(like.shape)))
