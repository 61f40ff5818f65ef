"""Into how many shards a variable is split, and along which axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mpistrat import arrays

_BYTES_PER_STRING = 16


class Partitioner:
    """Decides how `ParameterServerStrategy` splits variables; a function with the same arguments does as well."""

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """
        Args:
            shape: of the variable.
            dtype: of its elements: NumPy's, torch's, or a name.
            axis: along which it is split.
        Returns: how many pieces along each axis; 1 for all but `axis`.
        Raises:
            ValueError: `shape` has no such axis. TypeError: a size is not known.
        """
        raise NotImplementedError(f"{type(self).__name__} must say how it partitions, in __call__")


class FixedShardsPartitioner(Partitioner):
    """`num_shards` shards, or as many as there are rows."""

    def __init__(self, num_shards: int) -> None:
        self._num_shards = num_shards

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        _check(shape, axis)
        return _only_along(axis, min(self._num_shards, shape[axis]), shape)


class _SizePartitioner(Partitioner):
    """Reckons by the bytes of elements. Args: others: further arguments of the subclass, each at least 1."""

    def __init__(self, bytes_per_string: int, **others: int) -> None:
        for name, value in {**others, "bytes_per_string": bytes_per_string}.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self._bytes_per_string = bytes_per_string

    def _itemsize(self, dtype: Any) -> int:
        return arrays.itemsize_of(dtype) or self._bytes_per_string


class MinSizePartitioner(_SizePartitioner):
    """As many shards as can have `min_shard_bytes` each, by the mean: one of them may have a bit less.

    Args:
        min_shard_bytes: 256 KiB by default.
        max_shards: the most, 1 by default: nothing is split.
        bytes_per_string: what is reckoned for an element that is a text or another object.
    """

    def __init__(
        self,
        min_shard_bytes: int = 256 << 10,
        max_shards: int = 1,
        bytes_per_string: int = _BYTES_PER_STRING,
    ) -> None:
        super().__init__(bytes_per_string, min_shard_bytes=min_shard_bytes, max_shards=max_shards)
        self._min_shard_bytes, self._max_shards = min_shard_bytes, max_shards

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        _check(shape, axis)
        total = math.prod(shape) * self._itemsize(dtype)
        wanted = -(-total // self._min_shard_bytes)
        return _only_along(axis, max(1, min(shape[axis], self._max_shards, wanted)), shape)


class MaxSizePartitioner(_SizePartitioner):
    """As few shards as have at most `max_shard_bytes` each; a row is never split.

    Args:
        max_shards: the most, whatever size that makes them; None or 0 is no limit.
        bytes_per_string: what is reckoned for an element that is a text or another object.
    """

    def __init__(
        self,
        max_shard_bytes: int,
        max_shards: int | None = None,
        bytes_per_string: int = _BYTES_PER_STRING,
    ) -> None:
        super().__init__(
            bytes_per_string, max_shard_bytes=max_shard_bytes, max_shards=max_shards or 1
        )
        self._max_shard_bytes, self._max_shards = max_shard_bytes, max_shards

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        _check(shape, axis)
        at = axis % len(shape)
        others = math.prod([*shape[:at], *shape[at + 1 :]])
        row = others * self._itemsize(dtype)
        rows = max(1, self._max_shard_bytes // row if row else shape[axis])
        shards = max(1, -(-shape[axis] // rows))
        return _only_along(axis, min(shards, self._max_shards or shards), shape)


def _check(shape: Sequence[int], axis: int) -> None:
    for size in shape:
        if isinstance(size, bool) or not hasattr(size, "__index__"):
            raise TypeError(f"partitioning needs all sizes of a shape, got {list(shape)}")
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"a variable of shape {list(shape)} cannot be split along axis {axis}")


def _only_along(axis: int, shards: int, shape: Sequence[int]) -> list[int]:
    partitions = [1] * len(shape)
    partitions[axis] = shards
    return partitions
