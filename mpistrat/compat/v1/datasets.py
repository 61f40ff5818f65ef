"""Datasets that the methods of v1 strategies return or distribute."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from mpistrat import arrays, nest
from mpistrat.errors import OutOfRangeError
from mpistrat.input.distribution import safe_dataset
from mpistrat.replicas.input_plan import Share


class Calls:
    """A dataset of a function's results. An iteration ends when the function raises OutOfRangeError."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def __iter__(self) -> Iterator[Any]:
        with contextlib.suppress(OutOfRangeError):
            while True:
                yield self._function()


class BatchesOfWorker:
    """The batches for this worker's replicas: of n replicas on all workers, replica i takes every n-th batch from i on.

    Args:
        batches: all batches, equal on all workers.
        share: the numbers of this worker's replicas.
    """

    def __init__(self, batches: Iterable[Any], share: Share) -> None:
        self._batches = safe_dataset(batches)
        self._share = share

    def __iter__(self) -> Iterator[Any]:
        n = self._share.num_replicas
        pieces = {*self._share.pieces}
        return (batch for i, batch in enumerate(self._batches) if i % n in pieces)


class NumpyDataset:
    """A sequence of examples for `BatchedDataset`. Example i has the i-th slice along axis 0 of each array.

    Args:
        numpy_input: an array, or nested tuples and mappings of arrays. A list of arrays is stacked into one array.
    Raises:
        ValueError: the arrays do not have equal first dimensions.
    """

    def __init__(self, numpy_input: Any) -> None:
        self._arrays = _stacked(numpy_input)
        shapes = [tuple(leaf.shape) for leaf in nest.flatten(self._arrays)]
        sizes = {shape[:1] for shape in shapes}
        if len(sizes) != 1 or () in sizes:
            raise ValueError(
                "a dataset of arrays takes arrays with equal first dimensions, the number of examples; got shapes "
                f"{shapes}"
            )
        self._size = int(shapes[0][0])

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        if not -self._size <= index < self._size:
            raise IndexError(f"example {index} is out of range: there are {self._size}")
        return nest.map_structure(lambda array: array[index], self._arrays)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(self._size))


def _stacked(numpy_input: Any) -> Any:
    """Return `numpy_input` with each list stacked into one array, because tf.data takes a list as an array."""
    if isinstance(numpy_input, list):
        if not numpy_input:
            return np.zeros(0)
        leaves = [np.asarray(leaf) for leaf in numpy_input]
        return np.stack(leaves)
    if nest.is_structure(numpy_input):
        parts = numpy_input.values() if isinstance(numpy_input, Mapping) else numpy_input
        return nest.rebuild(numpy_input, [_stacked(part) for part in parts])
    if arrays.is_array(numpy_input):
        return numpy_input
    return np.asarray(numpy_input)
