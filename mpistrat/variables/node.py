"""Variables of a node: its ranks keep one copy in common memory, and update it together."""

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
    """Make a `NodeVariable`; make a `PlainVariable` on each rank if the ranks have no common memory for it.

    A single rank, an array on a GPU and an empty array have none. If the node lacks it, rank 0 warns of the reason.

    Called by: every rank of the node, in the same order.
    Args:
        value: initial value, equal on all ranks.
        how: further arguments of `PlainVariable`.
    """
    memory, why = None, ""
    nbytes = arrays.num_elements(value) * arrays.itemsize(value)
    if communicator.size > 1 and nbytes and not arrays.is_on_gpu(value):
        memory, why = communicator.memory.common_memory(-(-nbytes // PAGE) * PAGE)
    if memory is None:
        if why and communicator.rank == 0:
            warnings.warn(
                f"each rank keeps a copy of variable {name!r}: {why}", RuntimeWarning, stacklevel=2
            )
        return PlainVariable(value, trainable, name, *how)
    return NodeVariable(communicator, memory, value, trainable, name, *how)


class NodeVariable(PlainVariable):
    """A component of a variable in memory that the ranks of a node share.

    Reads return that memory itself: an array that was read before an update shows the new value afterwards. An update
    is collective, with an operand that is equal on all ranks; each rank computes a part of the new value.

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
        self._common.reshape(-1)[part] = arrays.detach(value).reshape(-1)[part]
        self._communicator.barrier(label="first value of a variable of the node")
        return _as(self._view.memory, value)

    def _update(self, method: str, operand: Any) -> Array:
        """Update this rank's part. All ranks raise an error of one rank. Called by: every rank of the node."""
        with self._communicator.raising_together():
            operand = fitting_operand(method, self._array, operand, self.name)
            if isinstance(operand, IndexedSlices):
                part = self._part_of(self._array.shape[0])
                indices = arrays.to_numpy(operand.indices).astype(np.int64)
                (inside,) = np.nonzero((indices >= part.start) & (indices < part.stop))
                rows = arrays.detach_read(operand.values)[inside]
                operand = IndexedSlices(rows, indices[inside] - part.start)
                target = self._common[part]
            else:
                part = self._part_of(arrays.num_elements(self._array))
                operand = operand.reshape(-1)[part]
                target = self._common.reshape(-1)[part]
            # A new array, because the operand may be a view of this variable's memory in another order.
            value = updated(method, target, operand, self.name)
        self._communicator.barrier(label=f"{method} to {self.name!r}")  # then all ranks have read
        target[...] = value
        # After this barrier all ranks have written.
        self._communicator.barrier(label=f"end of {method} to {self.name!r}")
        # This drops the program's own writes to arrays that it read.
        self._view.renew(self._view.written())
        return self._array

    def _part_of(self, length: int) -> slice:
        """Return the slice that this rank computes, of `length` elements or rows."""
        rank, size = self._communicator.rank, self._communicator.size
        return slice(length * rank // size, length * (rank + 1) // size)


def _as(memory: np.ndarray, like: Array) -> Array:
    """Return the first bytes of `memory` as an array of the library, dtype and shape of `like`."""
    nbytes = arrays.num_elements(like) * arrays.itemsize(like)
    numbers = memory[:nbytes].view(view_of(like).dtype).reshape(tuple(like.shape))
    return as_buffer_of(like, numbers)
