"""Recycled memory is never that of a result which somebody still holds."""

import weakref

import numpy as np
import pytest
import torch

from mpistrat.communicators.recycled_buffers import RecycledBuffers

LARGE = 1 << 17


@pytest.fixture(params=[np.zeros, torch.zeros], ids=["numpy", "torch"])
def zeros(request):
    return request.param


def address(array):
    return array.data_ptr() if isinstance(array, torch.Tensor) else array.ctypes.data


def another(buffers, like):
    return buffers.empty(like.shape, like.dtype)


def test_what_nobody_holds_is_used_again(zeros):
    buffers = RecycledBuffers()
    like = zeros(LARGE)
    first = address(another(buffers, like))
    assert address(another(buffers, like)) == first


def test_what_somebody_holds_is_not(zeros):
    buffers = RecycledBuffers()
    like = zeros(LARGE)
    held = [another(buffers, like) for _ in range(3)]
    held.append(another(buffers, like)[1:2])  # a view keeps the whole
    assert len({address(array) for array in held}) == 4
    of_views = {address(another(buffers, like)) for _ in range(3)}
    assert len(of_views) == 1
    assert not of_views & {address(array) for array in held[:3]}
    assert address(held[3]) - held[3].dtype.itemsize not in of_views


def test_they_are_idle_while_nobody_holds_one():
    buffers = RecycledBuffers(buffers=[np.zeros(LARGE, np.uint8) for _ in range(3)])
    assert buffers.are_idle()
    held = torch.from_numpy(buffers.free(LARGE // 2)).view(torch.float32)[3:]
    assert not buffers.are_idle()
    del held
    assert buffers.are_idle()


def test_shapes_and_dtypes(zeros):
    buffers = RecycledBuffers()
    for shape in ((), (0, 3), (4, 5), (3, LARGE)):
        array = another(buffers, zeros(shape))
        assert tuple(array.shape) == shape
        assert array.dtype == zeros(shape).dtype
    half = torch.zeros(LARGE, dtype=torch.bfloat16)
    assert another(buffers, half).dtype == torch.bfloat16


def test_only_so_many_are_kept():
    buffers = RecycledBuffers(kept=2)
    sizes = [LARGE, LARGE + 1, LARGE + 2]
    memory = [weakref.ref(another(buffers, np.zeros(size)).base) for size in sizes]
    kept = [reference().nbytes for reference in memory if reference() is not None]
    assert kept == [8 * size for size in sizes[1:]]
