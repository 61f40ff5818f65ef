"""Digests of arrays: what they notice, and that neither library nor device nor layout matters."""

from typing import Any

import numpy as np
import pytest
import torch

from mpistrat.pytorch.watch.digests import ROW, bits, difference, digest

SHAPES = [(), (1,), (0,), (7,), (ROW,), (ROW + 1,), (3, ROW), (5, 1000), (2, 3, ROW // 2)]
TORCH = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int64]
DTYPES = [*TORCH, torch.complex128, torch.int16, torch.uint8, torch.bool, torch.float8_e5m2]


def some(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return (torch.randn(shape, generator=generator) * 3).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_changed_bit_anywhere(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = some(shape, dtype)
    before = digest(tensor)
    assert digest(tensor.clone()) == before
    flat = bits(tensor)
    for place in {0, 1, len(flat) // 2, len(flat) - 1}:
        if 0 <= place < len(flat):
            for bit in (0, 8 * flat.itemsize - 2):
                flat[place] ^= 1 << bit
                assert digest(tensor) != before, (place, bit)
                flat[place] ^= 1 << bit
    assert digest(tensor) == before


@pytest.mark.parametrize(
    ("first", "second"), [(0, 1), (0, ROW), (5, 2 * ROW + 7), (2 * ROW, 3 * ROW + 1), (0, -1)]
)
@pytest.mark.parametrize("values", [(1.0, -1.0), (0.0, -0.0), (1.5, 2.5)])
def test_two_elements_that_changed_places(
    first: int, second: int, values: tuple[float, float]
) -> None:
    """In one row, in one column, in neither, and where no row is full; opposite signs differ in one bit."""
    tensor = some((3 * ROW + 9,), torch.float32)
    tensor[first], tensor[second] = values
    before = digest(tensor)
    tensor[first], tensor[second] = values[::-1]
    assert digest(tensor) != before


@pytest.mark.parametrize("shift", [1, ROW, ROW // 2])
def test_a_shift(shift: int) -> None:
    tensor = some((4 * ROW,), torch.float32)
    assert digest(tensor) != digest(tensor.roll(shift))


def test_dtype_and_shape_count() -> None:
    zeros = torch.zeros(6)
    different = {digest(zeros), digest(zeros.view(2, 3)), digest(zeros.int()), digest(zeros[:5])}
    assert len(different) == 4


def test_layout_does_not_count() -> None:
    images = some((2, 3, 40, 50), torch.float32)
    assert digest(images.to(memory_format=torch.channels_last)) == digest(images)
    shifted = torch.empty(images.numel() + 1)[1:].view_as(images).copy_(images)
    assert digest(shifted) == digest(images)
    assert digest(images.to_sparse()) == digest(images)
    conjugate = torch.view_as_complex(images.view(-1, 2)).conj()
    assert digest(conjugate) == digest(conjugate.resolve_conj())


@pytest.mark.parametrize("dtype", TORCH[:2] + TORCH[4:], ids=str)
def test_numpy_and_torch_have_the_same(dtype: torch.dtype) -> None:
    tensor = some((3, ROW), dtype)
    assert digest(tensor) == digest(tensor.numpy())


def test_nothing_is_copied() -> None:
    tensor = some((3, ROW), torch.float32)
    assert bits(tensor.requires_grad_()).ctypes.data == tensor.data_ptr()
    array = np.ones((2, 3))
    assert np.shares_memory(bits(array), array)


def test_other_values() -> None:
    assert digest(0.1) == digest(0.1) != digest(0.1 + 1e-17 + 1e-16)
    assert len({digest(value) for value in (1, 1.0, True, None, (0.9, 0.99), "max")}) == 6
    assert digest(float("nan")) == digest(float("nan"))


def test_nans_are_equal_if_their_bits_are() -> None:
    nans = np.array([np.nan, 1.0], np.float32)
    assert digest(nans) == digest(nans.copy())
    other = nans.copy()
    other.view(np.int32)[0] ^= 1
    assert np.isnan(other[0])
    assert digest(other) != digest(nans)
    found = difference(bits(other), bits(nans), nans)
    assert found is not None
    assert (found.differing, found.place) == (1, (0,))


def differ(own: Any, reference: Any) -> str:
    return str(difference(bits(own), bits(reference), own))


def test_the_largest_difference_is_told() -> None:
    reference = np.zeros((3, 4), np.float32)
    own = reference.copy()
    own[1, 2], own[2, 3] = 0.25, -0.5
    assert differ(own, reference) == "2 of 12 elements, most at [2, 3]: -0.5 instead of 0"
    own[0, 1] = np.nan
    assert differ(own, reference) == "3 of 12 elements, most at [0, 1]: nan instead of 0"
    assert differ(reference, reference) == "None"
    single = torch.tensor(3.0, dtype=torch.bfloat16)
    assert differ(single, single + 1) == "1 of 1 elements, most: 3 instead of 4"
    imaginary = torch.tensor([1 + 2j, 1 + 2j])
    text = differ(imaginary + torch.tensor([0, 1j]), imaginary)
    assert text == "1 of 4 elements, most at [1, 1]: 3 instead of 2"


def test_the_norm_of_a_difference_in_roundings() -> None:
    """By eps and the norm of the reference's finite elements; integers have no rounding."""

    def roundings(own: Any, reference: Any) -> float:
        found = difference(bits(own), bits(reference), own)
        assert found is not None
        return found.roundings

    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        reference = torch.full((16,), 2.0, dtype=dtype)
        reference[3] = -torch.inf
        own = reference.clone()
        own[5] += 4 * torch.finfo(dtype).eps
        assert roundings(own, reference) == pytest.approx(4 / (2 * 15**0.5))
    zeros = np.zeros(3)
    assert roundings(-zeros, zeros) == 0.0
    assert roundings(zeros + 1e-100, zeros) == np.inf
    assert roundings(np.array([1, 2]), np.array([1, 3])) == np.inf
    assert np.isnan(roundings(np.array([np.nan, 1.0]), np.ones(2)))
