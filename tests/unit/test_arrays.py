"""One face for NumPy and torch; a stand-in with CuPy's few attributes shows which branch an array takes."""

import sys
import types

import numpy as np
import pytest
import torch

from mpistrat import arrays

LIBRARIES = {"numpy": np.array, "torch": torch.tensor}
every_library = pytest.mark.parametrize("make", LIBRARIES.values(), ids=LIBRARIES)


def test_what_counts_as_an_array():
    assert all(map(arrays.is_array, [np.ones(1), np.float32(1), torch.ones(1)]))
    assert not any(map(arrays.is_array, [1.0, [1.0], None, "a"]))
    assert all(map(arrays.is_number, [True, 1, 1.0, 1j]))
    # NumPy's float64 is a float by inheritance, and has a dtype and a shape nevertheless
    assert not any(map(arrays.is_number, [np.float64(1), np.complex128(1), np.int32(1), "1"]))


def test_as_array():
    tensor = torch.ones(1)
    assert arrays.as_array(tensor) is tensor
    assert arrays.as_array([1, 2]).tolist() == [1, 2]
    assert arrays.as_array(2.5).shape == ()
    for bad in (None, "a", object(), ["a"], {1: 2}):
        with pytest.raises(TypeError, match="expected an array or a number, got"):
            arrays.as_array(bad)


def test_dtype_names_are_shared():
    assert arrays.dtype_name(np.ones(1, "f4")) == arrays.dtype_name(torch.ones(1)) == "float32"
    assert arrays.dtype_name(torch.ones(1, dtype=torch.bfloat16)) == "bfloat16"
    assert arrays.dtype_name(np.ones(1, bool)) == arrays.dtype_name(torch.ones(1) > 0) == "bool"
    assert arrays.itemsize(torch.ones(1, dtype=torch.bfloat16)) == 2


@every_library
def test_kinds_of_dtypes(make):
    kinds = [
        (arrays.is_floating(a), arrays.is_integer(a), arrays.is_bool(a))
        for a in (make([1.0]), make([1]), make([True]))
    ]
    assert kinds == [(True, False, False), (False, True, False), (False, False, True)]
    assert arrays.num_elements(make([[1, 2, 3], [4, 5, 6]])) == 6


@every_library
def test_a_copy_is_contiguous_and_its_own(make):
    array = make([[1.0, 2.0], [3.0, 4.0]]).T
    copied = arrays.copy(array)
    copied[0] = 0
    assert array.tolist() == [[1, 3], [2, 4]]
    assert copied.tolist() == [[0, 0], [2, 4]]


def test_copies_of_tensors_are_cut_off_from_autograd():
    array = torch.ones(2, requires_grad=True) * 2
    assert not arrays.copy(array).requires_grad
    assert not arrays.detach(array).requires_grad
    assert arrays.detach(array).data_ptr() == array.data_ptr()


@every_library
def test_cast(make):
    assert arrays.dtype_name(arrays.cast(make([1.5]), "int32")) == "int32"
    like = make([1, 2])
    cast = arrays.cast_like(np.array([1.0, 2.0]), like)
    assert type(cast) is type(like)
    assert cast.dtype == like.dtype
    zeros = arrays.zeros((2, 1), make([1.0]))
    assert (zeros.tolist(), type(zeros)) == ([[0], [0]], type(like))
    with pytest.raises(TypeError, match="float31"):
        arrays.cast(make([1.0]), "float31")


SCATTERED = {
    "add": [1, 16, 3],
    "sub": [1, -12, 3],
    "mul": [1, 90, 3],
    "div": [1, 2 / 45, 3],
    "min": [1, 2, 3],
    "max": [1, 9, 3],
    "update": [1, 9, 3],
}


@every_library
@pytest.mark.parametrize("combine", SCATTERED)
def test_scatter_counts_repeated_indices(make, combine):
    array = make([1.0, 2.0, 3.0])
    rows = make([9.0, 9.0] if combine == "update" else [5.0, 9.0])
    result = arrays.scatter(array, make([1, 1]), rows, combine)
    assert result.tolist() == pytest.approx(SCATTERED[combine])
    assert array.tolist() == [1, 2, 3]
    with pytest.raises(KeyError):
        arrays.scatter(array, make([1, 1]), rows, f"{combine}s")


@every_library
def test_sums_and_counts_over_axes(make):
    array = make([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    for axis, total, count in [
        (0, [5, 7, 9], 2),
        (-1, [6, 15], 3),
        ((0, 1), 21, 6),
        ([1], [6, 15], 3),
    ]:
        axes = arrays.check_axes(array, axis)
        assert arrays.sum_over(array, axes).tolist() == total
        assert int(arrays.count_over(array, axes)) == count
    assert arrays.check_axes(array, np.int64(-1)) == (1,)
    assert arrays.sum_over(make([1, 2]), (0,)).dtype == make([1]).dtype
    for bad in (2, -3, "0", None, 1.0, True, (0, 5)):
        with pytest.raises(ValueError, match="axis"):
            arrays.check_axes(array, bad)


@every_library
def test_division_of_integers_is_true(make):
    assert arrays.dtype_name(arrays.true_divide(make([3]), 2)) == "float64"
    assert arrays.true_divide(make([3]), 2).tolist() == [1.5]
    small = arrays.true_divide(arrays.cast(make([3]), "uint8"), 2)
    assert (small.tolist(), arrays.dtype_name(small)) == ([1.5], "float32")
    single = arrays.true_divide(arrays.cast(make([3.0]), "float32"), 2)
    assert arrays.dtype_name(single) == "float32"
    assert np.isnan(float(arrays.true_divide(make(0.0), 0)))


@every_library
def test_to_host_and_back(make):
    transposed = make([[1.0, 2.0], [3.0, 4.0]]).T
    host = arrays.to_host(transposed)
    flags = host.is_contiguous() if arrays.is_torch(host) else host.flags.c_contiguous
    assert flags
    assert host.tolist() == transposed.tolist()
    scalar = make(2.0)
    assert arrays.to_host(scalar).ndim == 0
    assert arrays.to_device_of(host, transposed) is host
    assert arrays.to_device(host, "cpu:1").tolist() == host.tolist()


def test_bfloat16_is_read_as_float32():
    read = arrays.to_numpy(torch.tensor([1.5], dtype=torch.bfloat16))
    assert (read.dtype, read.tolist()) == (np.float32, [1.5])


def test_concatenate_joins_along_an_axis():
    for make in LIBRARIES.values():
        joined = arrays.concatenate([make([[1], [2]]), make([[3, 4], [5, 6]])], 1)
        assert joined.tolist() == [[1, 3, 4], [2, 5, 6]]


def test_cupy_is_recognised_without_importing_it(monkeypatch):
    class Array:
        dtype = np.dtype("f4")

        def get(self):
            return np.ones(2, "f4")

    on_gpu = Array()
    assert not arrays.is_cupy(on_gpu)
    cupy = types.SimpleNamespace(ndarray=Array, asarray=lambda array, dtype=None: on_gpu)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert arrays.is_array(on_gpu)
    assert arrays.to_host(on_gpu).tolist() == [1, 1]
    assert arrays.to_device_of(np.ones(2), on_gpu) is on_gpu
    assert arrays.cast_like(np.ones(2), on_gpu) is on_gpu
