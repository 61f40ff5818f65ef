"""A strategy over all ranks, once with one replica per rank and once with two."""

import pytest
import torch

import mpistrat as ms


@pytest.fixture(autouse=True, scope="session")
def _one_thread_per_rank() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=[1, 2], ids=["k1", "k2"])
def strategy(request: pytest.FixtureRequest) -> ms.Strategy:
    devices = [f"cpu:{i}" for i in range(request.param)]
    return ms.MultiWorkerMirroredStrategy(devices=devices, gradients="sum")


@pytest.fixture
def one_per_rank() -> ms.Strategy:
    return ms.MultiWorkerMirroredStrategy(gradients="sum")
