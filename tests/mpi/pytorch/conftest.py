"""A strategy over all ranks, in the ways of support.training.ways_to_mirror, or with one replica per rank."""

import pytest

import mpistrat as ms
from support.training.ways_to_mirror import one_thread_per_rank as one_thread_per_rank
from support.training.ways_to_mirror import strategy as strategy


@pytest.fixture
def one_per_rank() -> ms.Strategy:
    return ms.MultiWorkerMirroredStrategy(gradients="sum")
