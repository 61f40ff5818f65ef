"""Sparse rows."""

import numpy as np
import torch

from mpistrat.indexed_slices import IndexedSlices


def test_lists_become_arrays():
    slices = IndexedSlices([[1.0, 2.0]], [3], (5, 2))
    assert (slices.values.shape, slices.indices.tolist()) == ((1, 2), [3])


def test_arrays_stay_themselves():
    values, indices = torch.ones(2, 3), torch.tensor([1, 1])
    slices = IndexedSlices(values, indices)
    assert slices.values is values
    assert slices.indices is indices
    assert slices.dense_shape is None
    empty = IndexedSlices(np.ones((0, 3)), np.zeros(0, int), (4, 3))
    assert len(empty.indices) == 0
