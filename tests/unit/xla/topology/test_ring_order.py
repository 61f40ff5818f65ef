"""Rings of chips: each chip once, each beside the next."""

import itertools

import numpy as np
import pytest

from mpistrat.xla.topology.device_assignment import ring_order

EVEN = [1, 2, 4, 6]


@pytest.mark.parametrize("shape", list(itertools.product(EVEN, EVEN, EVEN)), ids=str)
def test_even_boxes(shape):
    ring = ring_order(shape)
    assert sorted(map(tuple, ring.tolist())) == list(np.ndindex(*shape))
    assert ring[0].tolist() == [0, 0, 0]
    steps = np.abs(np.diff(ring, axis=0, append=ring[:1])).sum(axis=1)
    line = sum(length > 1 for length in shape) < 2
    assert (steps[:-1] == 1).all()
    assert line or steps[-1] == 1


def test_odd_lengths_are_numbered_x_first():
    assert ring_order([2, 1, 3]).tolist() == [[x, 0, z] for z in range(3) for x in range(2)]
    assert ring_order([3, 2, 2])[:4].tolist() == [[0, 0, 0], [1, 0, 0], [2, 0, 0], [0, 1, 0]]


def test_a_layer():
    order = [0, 1, 2, 3, 15, 6, 5, 4, 14, 7, 8, 9, 13, 12, 11, 10]
    places = {(x, y, 0): order[4 * y + x] for x in range(4) for y in range(4)}
    assert [places[tuple(chip)] for chip in ring_order([4, 4, 1]).tolist()] == sorted(order)
