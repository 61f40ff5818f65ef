"""How many calls, files and returns lie on the ways of a value, a gradient and a batch: see `support.trips`."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.utils.data import DataLoader, TensorDataset

import mpistrat as ms
from support.trips import Figures, least

pytestmark = pytest.mark.mpi(min_size=2)

SIZE = MPI.COMM_WORLD.size
MEGABYTES = torch.ones(1 << 20)
VALUES = {
    "16 B of NumPy": (np.ones(2), Figures(22, 12)),
    "8 B of torch": (torch.ones(2), Figures(26, 12)),
    "4 MB of torch": (MEGABYTES, Figures(35 + 2 * (MEGABYTES.nbytes // (512 << 10)), 15)),
    "a dict of two tensors": ({"a": torch.ones(3), "b": torch.ones(4)}, Figures(45, 13)),
}
LAYER_NBYTES = 4 * (8 * 8 + 8)


def strategy(**options):
    """Over a communicator of its own, which has seen no call yet."""
    return ms.MultiWorkerMirroredStrategy(
        comm=MPI.COMM_WORLD.Dup(),
        gradients="sum",
        communication_options=ms.CommunicationOptions(**options),
    )


@pytest.mark.parametrize("name", VALUES)
def test_a_value(name):
    (value, most), whole = VALUES[name], strategy()

    def reduce():
        ms.get_replica_context().all_reduce("sum", value)

    whole.run(reduce)  # measures, once
    whole.extended.communicator.transports.preferred[0].borders = [0]
    whole.run(lambda: least(reduce)).check(most)


@pytest.mark.parametrize(("layers", "buckets"), [(2, 0), (20, 0), (2, 2), (20, 4)])
def test_gradients(layers, buckets):
    """Of a weight and a bias for each layer. Buckets leave early."""
    options = {"overlap": bool(buckets)}
    if buckets:
        options["bytes_per_pack"] = LAYER_NBYTES * layers // buckets
    whole, losses = strategy(**options), []
    with whole.scope():
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(layers)))

    def forward():
        model.zero_grad()
        losses.append(model(torch.ones(1, 8)).sum())

    trip = whole.run(lambda: least(lambda: losses.pop().backward(), forward))
    how = whole.extended.explain()
    assert ("while backward() runs" in how) == bool(buckets), how
    trip.check(Figures(60 + 2 * layers + buckets, 20, 30))


def test_a_batch():
    loader = DataLoader(TensorDataset(torch.ones(50 * SIZE, 8)), batch_size=SIZE)
    iterator = iter(strategy().experimental_distribute_dataset(loader))
    least(lambda: next(iterator)).check(Figures(25, 10))


def test_a_tensor_of_a_process_group():
    dist.init_process_group("mpistrat", init_method="mpi://")
    tensor = torch.ones(2)
    try:
        least(lambda: dist.all_reduce(tensor)).check(Figures(22, 11))
    finally:
        dist.destroy_process_group()
