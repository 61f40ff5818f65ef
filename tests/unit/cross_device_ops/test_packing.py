"""Fusing arrays: where groups end, and that unpacking is the inverse of packing."""

import numpy as np
import pytest
import torch

from mpistrat import arrays
from mpistrat.cross_device_ops import packing

every_library = pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["numpy", "torch"])


def sizes_of_groups(sizes, bytes_per_pack):
    groups = packing.group_by_size([np.zeros(size, "f4") for size in sizes], bytes_per_pack)
    return [[value.nbytes for value in group] for group in groups]


def test_a_group_is_closed_once_it_exceeds_the_limit():
    assert sizes_of_groups([10, 20, 30, 40], 40) == [[40, 80], [120], [160]]
    assert sizes_of_groups([10, 10, 10], 40) == [[40, 40], [40]]
    assert sizes_of_groups([10, 20, 30], 0) == [[40, 80, 120]]
    assert sizes_of_groups([10, 20], 1) == [[40], [80]]
    assert sizes_of_groups([], 40) == []
    assert sizes_of_groups([0, 0, 5], 1) == [[0, 0, 20]]


def test_a_group_has_one_dtype():
    values = [np.zeros(1, dtype) for dtype in ("f4", "f4", "f8", "f4")]
    groups = packing.group_by_size(values, 0)
    assert [[v.dtype.itemsize for v in group] for group in groups] == [[4, 4], [8], [4]]


@every_library
@pytest.mark.parametrize(
    ("num_packs", "lengths"), [(1, [7]), (2, [3, 4]), (3, [2, 2, 3]), (8, [0] * 7 + [7])]
)
def test_packs_are_equal_but_the_last(make, num_packs, lengths):
    values = [make([[1.0, 2.0], [3.0, 4.0]]), make(5.0), make([6.0, 7.0]), make([])]
    packs = packing.concat_and_split(values, num_packs)
    assert [arrays.num_elements(pack) for pack in packs] == lengths
    unpacked = packing.unpack(arrays.concatenate(packs), values)
    assert [value.tolist() for value in unpacked] == [value.tolist() for value in values]
    assert [tuple(value.shape) for value in unpacked] == [(2, 2), (), (2,), (0,)]
