"""Sums in the order of a reduction tree: the same bits however replicas are spread over ranks."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from mpi4py import MPI

from mpistrat.arrays import Array, dtype_name, is_torch
from mpistrat.communicators import reducing
from mpistrat.communicators.construction import communicator_for
from mpistrat.communicators.reduction.tree import tree_of_ranks, tree_of_replicas
from mpistrat.communicators.router import Router, Transports
from mpistrat.communicators.transports.mpi import MpiTransport

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
SHORT = ("float16", "bfloat16")


def value_of(replica: int, length: int, dtype: str) -> Array:
    """Numbers of very different sizes, so that the order of additions shows."""
    numbers = np.random.default_rng(replica).standard_normal(length)
    numbers *= 10.0 ** (replica * 5 % 4)
    if dtype == "complex64":
        return (numbers + 1j * numbers[::-1]).astype(np.complex64)
    if dtype == "bfloat16":
        return torch.from_numpy(numbers).to(torch.bfloat16)
    return numbers.astype(dtype)


def wide(array: Array) -> Array:
    if dtype_name(array) not in SHORT:
        return array
    return array.float() if is_torch(array) else array.astype(np.float32)


def by_definition(values: Sequence[Array]) -> Array:
    """Level by level: neighbours in pairs, an odd one goes up unchanged."""
    level = [wide(value) for value in values]
    while len(level) > 1:
        pairs = [level[i : i + 2] for i in range(0, len(level), 2)]
        level = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
    return level[0]


def held_by(rank: int, each: int, length: int, dtype: str) -> Array:
    """What a rank of `each` replicas hands over."""
    tree = tree_of_replicas(SIZE * each, rank * each, (rank + 1) * each)
    sums = [value_of(rank * each + i, length, dtype) for i in range(each)]
    if each > 1:
        sums = [wide(value) for value in sums]
    for to, added in tree.additions:
        sums[to] = sums[to] + sums[added]
    stacked = [sums[position] for position in tree.left]
    return torch.stack(stacked) if is_torch(stacked[0]) else np.stack(stacked)


def bits(array: Array) -> bytes:
    return array.view(torch.int16).numpy().tobytes() if is_torch(array) else array.tobytes()


@pytest.mark.parametrize("way", ["by memory", "over MPI"])
@pytest.mark.parametrize("each", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("length", [0, 1, 5, 50_001])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "float16", "bfloat16"])
def test_every_way_gives_the_bits_of_the_definition(
    way: str, each: int, length: int, dtype: str
) -> None:
    communicator = communicator_for(MPI.COMM_WORLD)
    if way == "over MPI" and SIZE > 1:
        communicator = flat_communicator()
    sums = held_by(RANK, each, length, dtype)
    communicator.all_reduce_by_tree(sums, tree_of_ranks((each,) * SIZE), reducing(scale=0.3))
    total = by_definition([value_of(i, length, dtype) for i in range(SIZE * each)])
    expected = total * 0.3 if is_torch(total) else total * total.dtype.type(0.3)
    if each == 1 and dtype in SHORT:
        expected = expected.to(torch.bfloat16) if is_torch(total) else expected.astype(dtype)
        assert bits(sums[0]) == bits(expected)
    else:
        assert wide(sums[0]).shape == expected.shape
        assert np.asarray(sums[0]).tobytes() == np.asarray(expected).tobytes()


def flat_communicator() -> Router:
    global _flat
    if _flat is None:
        _flat = Router(Transports(MpiTransport(MPI.COMM_WORLD.Dup())))
    return _flat


_flat: Router | None = None


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_where_they_lie_in_the_window(each: int, dtype: str) -> None:
    length = 300_001
    sums = held_by(RANK, each, length, dtype)
    memory = communicator_for(MPI.COMM_WORLD).memory.window_buffer(sums.nbytes)
    if memory is None:
        assert SIZE == 1
        return
    if is_torch(sums):
        there = torch.from_numpy(memory).view(sums.dtype).view(sums.shape).copy_(sums)
    else:
        there = memory.view(sums.dtype).reshape(sums.shape)
        there[:] = sums
    communicator_for(MPI.COMM_WORLD).all_reduce_by_tree(there, tree_of_ranks((each,) * SIZE))
    expected = by_definition([value_of(i, length, dtype) for i in range(SIZE * each)])
    if is_torch(there):
        assert torch.equal(there[0], expected.to(there.dtype))
    else:
        assert there[0].tobytes() == expected.tobytes()


def test_what_cannot_be_added_up_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot be added up in the order of replicas"):
        communicator_for(MPI.COMM_WORLD).all_reduce_by_tree(
            np.zeros((1, 3), np.longdouble), tree_of_ranks((1,) * SIZE)
        )
