import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from mpistrat.parameter_server.coordinator.worker import seed_for_worker


def draw() -> tuple[float, float, float]:
    return random.random(), np.random.random(), float(torch.rand(()))


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def drawn_by(worker: int, seed: int) -> tuple[float, float, float]:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    seed_for_worker(worker)
    return draw()


def test_each_worker_draws_its_own_numbers_and_the_same_ones_again() -> None:
    drawn = {(worker, seed): drawn_by(worker, seed) for worker in range(4) for seed in (0, 1)}
    for of_one in zip(*drawn.values(), strict=True):
        assert len(set(of_one)) == len(drawn)
    assert drawn == {key: drawn_by(*key) for key in drawn}


def test_unseeded_programs_stay_unseeded() -> None:
    seed_for_worker(0)
    first = draw()
    seed_for_worker(0)
    assert not set(first) & set(draw())
