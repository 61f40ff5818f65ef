"""Eight ranks, more than the cores of a small machine: values and training are those of one process."""

import copy

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpistrat as ms

pytestmark = [pytest.mark.mpi(min_size=8), pytest.mark.time_limit(120)]

BATCH = 21  # the last replica has no examples: 21 in pieces of 3 fill 7


@pytest.fixture(scope="module", params=[1, 2], ids=["k=1", "k=2"])
def strategy(request):
    return ms.MultiWorkerMirroredStrategy(devices=[f"cpu:{i}" for i in range(request.param)])


def replica_id():
    return ms.get_replica_context().replica_id_in_sync_group


def test_reduce_and_gather(strategy):
    n = strategy.num_replicas_in_sync
    values = strategy.run(lambda: np.array([1.0 + replica_id()]))
    assert strategy.reduce("sum", values, axis=None).tolist() == [n * (n + 1) / 2]
    assert strategy.gather(values, axis=0).tolist() == [1.0 + i for i in range(n)]


def test_training(strategy):
    torch.manual_seed(MPI.COMM_WORLD.rank)
    with strategy.scope():
        model = torch.nn.Linear(3, 2).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alone = copy.deepcopy(model)
    optimizer_alone = torch.optim.SGD(alone.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, 3, generator=generator, dtype=torch.float64)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=BATCH)

    def step(batch):
        loss = ms.compute_average_loss(model(batch[0]).square().sum(1), global_batch_size=len(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    for _ in range(3):
        for batch in strategy.experimental_distribute_dataset(loader):
            total = strategy.reduce("sum", strategy.run(step, (batch,)), axis=None)
        loss = alone(x).square().sum(1).mean()
        optimizer_alone.zero_grad()
        loss.backward()
        optimizer_alone.step()
        torch.testing.assert_close(total, loss.detach())
    torch.testing.assert_close(model.state_dict(), alone.state_dict())
