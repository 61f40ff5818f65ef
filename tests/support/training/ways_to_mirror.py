"""Fixtures: a strategy over all ranks, in the ways in which parameters and gradients are kept.

One replica per rank, or two; gradients that leave one by one; parameters that the ranks of a node share.
Gradients leave while `backward()` runs from the third step on, when it is known which parameters are used.
"""

import pytest
import torch

import mpistrat as ms


@pytest.fixture(autouse=True, scope="session")
def one_thread_per_rank() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=["k1", "k2", "overlap", "shared"])
def strategy(request: pytest.FixtureRequest) -> ms.Strategy:
    if request.param == "overlap":
        one_by_one = ms.CommunicationOptions(overlap=True, bytes_per_pack=1)
        return ms.MultiWorkerMirroredStrategy(communication_options=one_by_one, gradients="sum")
    if request.param == "shared":
        return ms.MultiWorkerMirroredStrategy(gradients="sum", shared_parameters=True)
    count = int(request.param[1:])
    devices = [f"cpu:{number}" for number in range(count)]
    return ms.MultiWorkerMirroredStrategy(devices=devices, gradients="sum")
