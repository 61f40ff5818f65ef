"""`torch.set_default_device`: what the package makes for itself is where it belongs, and what the program makes there.

The meta device stands for an accelerator: tensors on it have no values, so that what goes there by mistake is noticed.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import mpistrat as ms
from mpistrat.checkpoint import Checkpoint, CheckpointManager

pytestmark = pytest.mark.mpi(min_size=2)

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
HOST = torch.device("cpu")


@pytest.fixture(autouse=True)
def on_meta() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


class Examples(TensorDataset):
    """Its examples say on which device the program would have made them."""

    made_on: ClassVar[list[str]] = []

    def __getitem__(self, index: int) -> Any:
        self.made_on.append(torch.empty(0).device.type)
        return super().__getitem__(index)


def train(folder: Path, **options: Any) -> list[float]:
    """The losses of some steps, a checkpoint in between; then the parameters. The program names the host everywhere."""
    strategy = ms.MultiWorkerMirroredStrategy(gradients="sum", **options)
    with HOST:
        torch.manual_seed(0)
        x, y = torch.randn(24, 5), torch.arange(24) % 3
        table, net = nn.Embedding(7, 5, sparse=True), nn.Linear(5, 4)
    with strategy.scope():
        norm = ms.convert_sync_batchnorm(nn.BatchNorm1d(4, device=HOST))
        model = nn.Sequential(net, norm, nn.Linear(4, 3, device=HOST))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        of_table = torch.optim.SGD(table.parameters(), lr=0.1)
    strategy.mirror(table)
    shuffled = DataLoader(
        Examples(x, y), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(3)
    )
    data = strategy.experimental_distribute_dataset(shuffled)
    objects = {"model": model, "optimizer": optimizer, "data": data, "table": table}
    saved = CheckpointManager(Checkpoint(**objects), folder)

    where = torch.empty(0).device

    def step(batch: Any) -> Any:
        assert torch.empty(0).device == where
        optimizer.zero_grad()
        of_table.zero_grad()
        features, labels = batch
        logits = model(features + table(labels))
        losses = functional.cross_entropy(logits, labels, reduction="none")
        loss = ms.compute_average_loss(losses)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with HOST:  # where torch 2.9 makes Adam's counter
            optimizer.step()
        of_table.step()
        return loss.detach()

    found = []
    for batch in data:
        found.append(float(strategy.reduce("sum", strategy.run(step, (batch,)), axis=None)))
    saved.save(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    saved.restore_or_initialize()
    found += [float(p.detach().double().sum()) for p in (*model.parameters(), table.weight)]
    return found


@pytest.mark.parametrize(
    "options",
    [{"devices": ["cpu:0", "cpu:1"]}, {"shared_parameters": True}],
    ids=["k2", "shared"],
)
def test_training(directory: Path, options: dict[str, Any]) -> None:
    found = train(directory / "meta", **options)
    assert set(Examples.made_on) == {"meta"}
    torch.set_default_device(None)
    assert found == train(directory / "host", **options)
    Examples.made_on.clear()


def test_calls_inside_a_replica() -> None:
    strategy = ms.MultiWorkerMirroredStrategy(gradients="sum")
    expected = [float(sum(range(1, SIZE + 1)))] * 3

    def call() -> None:
        context = ms.get_replica_context()
        own = torch.full((3,), RANK + 1.0, device=HOST, requires_grad=True)
        plain = own.detach()
        for reduced in context.all_reduce("sum", [plain, plain.bfloat16(), plain.numpy(), plain]):
            assert reduced.tolist() == expected
        for op in ("max", "min", "product"):
            assert {value.device for value in context.all_reduce(op, [plain, plain > 1])} == {HOST}
        rows = ms.IndexedSlices(plain[:, None], torch.arange(3, device=HOST), (4, 1))
        assert context.all_reduce("sum", rows).values.device == HOST
        gathered = context.all_gather(own, axis=0)
        (gradient,) = torch.autograd.grad((gathered * gathered.detach()).sum(), own)
        assert gradient.tolist() == [SIZE * (RANK + 1.0)] * 3

    strategy.run(call)


def test_outside_of_replicas_and_in_a_default_group() -> None:
    strategy = ms.MultiWorkerMirroredStrategy(gradients="sum")
    with strategy.scope():
        variable = ms.Variable(torch.zeros(3, device=HOST))
    variable.assign(np.arange(3, dtype="f4"))
    variable.scatter_add(ms.IndexedSlices(np.ones(1, "f4"), [1]))
    assert variable.read_value().tolist() == [0, 2, 2]
    own = strategy.run(lambda: torch.full((2,), float(RANK), device=HOST))
    assert strategy.gather(own, axis=0).tolist() == [r for r in range(SIZE) for _ in range(2)]
    assert strategy.reduce("max", own, axis=0).tolist() == SIZE - 1
    assert strategy.broadcast_object({"of": RANK}) == {"of": 0}
    dist.init_process_group("mpistrat", init_method="mpi://")
    try:
        everyone: list[Any] = [None] * SIZE
        dist.all_gather_object(everyone, {"rank": RANK})
        assert everyone == [{"rank": rank} for rank in range(SIZE)]
        sparse = torch.ones(2, 2, device=HOST).to_sparse()
        dist.all_reduce(sparse)
        assert sparse.to_dense().tolist() == [[SIZE] * 2] * 2
        outs = [torch.empty(1, device=HOST) for _ in range(SIZE)]
        dist.all_to_all(outs, [torch.ones(1, device=HOST)] * SIZE)
        dist.barrier()
    finally:
        dist.destroy_process_group()
