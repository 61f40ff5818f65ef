"""Partitioners: they decide into how many shards a variable is split along an axis."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

from mpistrat import arrays

_BYTES_PER_STRING = 16


class Partitioner:
    """Decides how `ParameterServerStrategy` splits variables.

    A function with the arguments of `__call__` works as well.

    Example:
        >>> class HalfPartitioner(ms.experimental.partitioners.Partitioner):
        ...     def __call__(self, shape, dtype, axis=0):
        ...         return [2 if i == axis else 1 for i in range(len(shape))]
        >>> HalfPartitioner()([100, 8], "float32")
        [2, 1]
    """

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Return the number of shards along each axis: 1 along all axes but `axis`.

        Args:
            shape: shape of the variable.
            dtype: dtype of the variable: NumPy's, torch's, or a name.
            axis: axis along which the variable is split.
        Raises:
            ValueError: `shape` has no such axis.
            TypeError: a size in `shape` is no integer.
        """
        raise NotImplementedError(f"{type(self).__name__} must define __call__ to partition")


class FixedShardsPartitioner(Partitioner):
    """Splits a variable into `num_shards` shards, or into as many as it has rows if these are fewer.

    Example:
        >>> partitioner = ms.experimental.partitioners.FixedShardsPartitioner(4)
        >>> partitioner([100, 8], "float32"), partitioner([3, 8], "float32")
        ([4, 1], [3, 1])
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = num_shards

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        _check(shape, axis)
        return _only_along(axis, min(self._num_shards, shape[axis]), shape)


class _SizePartitioner(Partitioner):
    """A partitioner by bytes. Args: others: arguments of the subclass. Raises: ValueError if an argument is below 1."""

    def __init__(self, bytes_per_string: int, **others: int) -> None:
        for name, value in {**others, "bytes_per_string": bytes_per_string}.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self._bytes_per_string = bytes_per_string

    def _itemsize(self, dtype: Any) -> int:
        return arrays.itemsize_of(dtype) or self._bytes_per_string


class MinSizePartitioner(_SizePartitioner):
    """Splits a variable into shards of about `min_shard_bytes`.

    The number of shards is the variable's size divided by `min_shard_bytes`, rounded up; at most `max_shards`, and at
    most one for each row.

    Args:
        min_shard_bytes: size of a shard in bytes, 256 KiB by default.
        max_shards: the most shards. The default of 1 splits nothing.
        bytes_per_string: bytes of an element that is a text or another object.

    Example:
        >>> partitioner = ms.experimental.partitioners.MinSizePartitioner(min_shard_bytes=1024, max_shards=8)
        >>> partitioner([100, 10], "float32")  # 4000 bytes
        [4, 1]
    """

    def __init__(
        self,
        min_shard_bytes: int = 256 << 10,
        max_shards: int = 1,
        bytes_per_string: int = _BYTES_PER_STRING,
    ) -> None:
        super().__init__(bytes_per_string, min_shard_bytes=min_shard_bytes, max_shards=max_shards)
        self._min_shard_bytes = min_shard_bytes
        self._max_shards = max_shards

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        _check(shape, axis)
        total = math.prod(shape) * self._itemsize(dtype)
        wanted = -(-total // self._min_shard_bytes)
        shards = min(shape[axis], self._max_shards, wanted)
        return _only_along(axis, max(1, shards), shape)


class MaxSizePartitioner(_SizePartitioner):
    """Splits a variable into as few shards as possible, of at most `max_shard_bytes` each. A row is never split.

    Args:
        max_shard_bytes: largest size of a shard in bytes; a shard of one row may be larger.
        max_shards: the most shards, however large that makes them; None or 0 is no limit.
        bytes_per_string: bytes of an element that is a text or another object.

    Example:
        >>> partitioner = ms.experimental.partitioners.MaxSizePartitioner(max_shard_bytes=1024)
        >>> partitioner([100, 10], "float32")  # 25 rows of 40 bytes fit
        [4, 1]
    """

    def __init__(
        self,
        max_shard_bytes: int,
        max_shards: int | None = None,
        bytes_per_string: int = _BYTES_PER_STRING,
    ) -> None:
        most = max_shards or sys.maxsize
        super().__init__(bytes_per_string, max_shard_bytes=max_shard_bytes, max_shards=most)
        self._max_shard_bytes = max_shard_bytes
        self._max_shards = most

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        _check(shape, axis)
        others = list(shape)
        del others[axis]
        row = math.prod(others) * self._itemsize(dtype)
        rows = shape[axis]
        if row:
            rows = self._max_shard_bytes // row
        rows = max(1, rows)
        shards = max(1, -(-shape[axis] // rows))
        return _only_along(axis, min(shards, self._max_shards), shape)


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
