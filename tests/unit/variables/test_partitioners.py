"""What the recorded cases leave open: dtypes of every library, other axes, sizes that are not known."""

import numpy as np
import pytest
import torch

from mpistrat.experimental.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
)


@pytest.mark.parametrize("dtype", ["float32", np.float32, np.dtype("float32"), torch.float32])
def test_dtypes_of_every_library(dtype: object) -> None:
    assert MaxSizePartitioner(40)([np.int64(20)], dtype) == [2]
    assert MinSizePartitioner(40, max_shards=9)([20], dtype) == [2]


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_dtypes_that_numpy_lacks(dtype: object) -> None:
    assert MaxSizePartitioner(10)([20], dtype) == [4]


@pytest.mark.parametrize("dtype", ["string", "U7", object])
def test_what_has_no_size_of_its_own(dtype: object) -> None:
    assert MaxSizePartitioner(40, bytes_per_string=20)([20], dtype) == [10]


@pytest.mark.parametrize("axis", [-1, 1])
def test_another_axis(axis: int) -> None:
    assert MaxSizePartitioner(40)([5, 4], "float32", axis=axis) == [1, 2]
    assert FixedShardsPartitioner(3)([5, 4], "float32", axis=axis) == [1, 3]
    assert MinSizePartitioner(40, max_shards=9)([5, 4], "float32", axis=axis) == [1, 2]


def test_names_are_numpy_s() -> None:
    assert MaxSizePartitioner(8)([4], "float") == [4]


def test_nothing_to_split() -> None:
    assert MaxSizePartitioner(40)([0, 4], "float32") == [1, 1]
    assert MaxSizePartitioner(40)([4, 0], "float32") == [1, 1]


@pytest.mark.parametrize(
    "partitioner", [FixedShardsPartitioner(2), MinSizePartitioner(), MaxSizePartitioner(4)]
)
def test_bad_shapes(partitioner: FixedShardsPartitioner) -> None:
    with pytest.raises(TypeError, match=r"all sizes of a shape, got \[None, 2\]"):
        partitioner([None, 2], "float32")  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"shape \[2\] cannot be split along axis 1"):
        partitioner([2], "float32", axis=1)
    with pytest.raises(ValueError, match=r"shape \[\] cannot be split along axis 0"):
        partitioner([], "float32")
