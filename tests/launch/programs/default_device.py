"""`torch.set_default_device("sim")` is the first line; the numbers are to be those of the CPU as the default device.

Usage: default_device.py FOLDER, which all ranks see. Rank 0 prints "same" and the number of results that it compared.
"""

import logging
import sys
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

import mpistrat as ms
from mpistrat.checkpoint import Checkpoint, CheckpointManager
from mpistrat.communicators.transports.accelerator import gpu_transports

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.simulated_accelerator import torch_sim

FOLDER = Path(sys.argv[1])
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
SIM = torch_sim.load()
# Processes would import torch to find out that MPI does not take the simulated device's memory.
gpu_transports.why_not_proven = lambda *args: "not tried"
made_on: set[str] = set()


class Examples(TensorDataset):
    """Each example gets a tensor more, which is made on the default device."""

    def __getitem__(self, index: int) -> Any:
        row = torch.tensor(index % 5)
        made_on.add(row.device.type)
        return *super().__getitem__(index), row


def results(kind: str) -> dict[str, torch.Tensor]:
    torch.set_default_device(kind)
    devices = ["cpu:0"] if kind == "cpu" else None
    strategy = ms.MultiWorkerMirroredStrategy(devices=devices, gradients="sum")
    with strategy.scope():
        norm = ms.convert_sync_batchnorm(nn.BatchNorm1d(4))
        model = nn.Sequential(nn.Linear(5, 4), norm, nn.ReLU(), nn.Linear(4, 3))
        table = nn.Embedding(5, 5, sparse=True)
    modules = nn.ModuleList([model, table])
    with torch.no_grad():
        for i, parameter in enumerate(modules.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter) + 0.1 * i)
    x = torch.linspace(-2, 2, 120).view(24, 5).sin()
    generator = torch.Generator(kind).manual_seed(1)
    loader = DataLoader(Examples(x, torch.arange(24) % 3), 8, shuffle=True, generator=generator)
    data = strategy.experimental_distribute_dataset(loader)
    manager = CheckpointManager(Checkpoint(modules=modules, data=data), FOLDER / kind)

    def step(batch: Any) -> torch.Tensor:
        features, labels, rows = batch
        modules.zero_grad()
        logits = model(features + table(rows))
        losses = functional.cross_entropy(logits, labels, reduction="none")
        loss = ms.compute_average_loss(losses)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with torch.no_grad():  # torch.optim's classes take longer to import than all this takes
            for parameter in modules.parameters():
                parameter -= 0.1 * parameter.grad.to_dense()
        return loss.detach()

    found = {}
    for number, batch in enumerate(data):
        found[f"loss {number}"] = strategy.reduce("sum", strategy.run(step, (batch,)), axis=None)
    manager.save(3)
    with torch.no_grad():
        for parameter in modules.parameters():
            parameter.zero_()
    manager.restore_or_initialize()
    found |= {name: value.detach() for name, value in modules.state_dict().items()}
    assert {value.device.type for value in found.values()} == {kind}

    def calls() -> Any:
        context = ms.get_replica_context()
        own = torch.full((3,), RANK + 1.0, requires_grad=True)
        values = [own.detach(), own.detach().bfloat16(), own.detach().cpu(), own.detach()]
        sums = context.all_reduce("sum", values)
        largest = context.all_reduce("max", own.detach())
        gathered = context.all_gather(own, axis=0)
        return *sums, largest, *torch.autograd.grad((gathered * gathered.detach()).sum(), own)

    found |= {f"call {i}": value for i, value in enumerate(strategy.run(calls))}
    found["gathered"] = strategy.gather(strategy.run(lambda: torch.full((2,), RANK)), axis=0)
    return {name: value.cpu() for name, value in found.items()}


def check_that_an_epoch_goes_on() -> None:
    """A sampler without a generator draws from that of the default device."""
    strategy = ms.MultiWorkerMirroredStrategy(gradients="sum")
    torch.manual_seed(5)

    def read(state: dict[str, Any] | None) -> tuple[dict[str, Any], Any]:
        loader = DataLoader(
            TensorDataset(torch.arange(24)), 6, sampler=SubsetRandomSampler(range(24))
        )
        data = strategy.experimental_distribute_dataset(loader)
        if state is not None:
            data.load_state_dict(state)
        batches = iter(data)
        if state is None:
            next(batches)
            state = data.state_dict()
        return state, [batch[0].tolist() for batch in batches]

    state, rest = read(None)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mpistrat").addHandler(handler)
    assert read(state) == (state, rest)
    assert not said
    torch.set_default_device("cpu")
    read(state)
    assert [text.count("another torch.set_default_device") for text in said] == [1] * (RANK == 0)


def main() -> None:
    ours = results("sim")
    check_that_an_epoch_goes_on()
    assert made_on == {"sim"}, made_on
    expected = results("cpu")
    for name, value in expected.items():
        assert ours[name].dtype is value.dtype, name
        assert torch.allclose(ours[name], value, atol=1e-6), (name, ours[name], value)
    assert not SIM.violations(), SIM.violations()[:3]
    if RANK == 0:
        print("same", len(expected), flush=True)


main()
