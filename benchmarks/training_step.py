"""One training step of an MLP of 4.2 (25) million parameters beside raw MPI and DistributedDataParallel.

    mpiexec -n 2 python benchmarks/training_step.py

Batch 64 per rank, SGD, one compute thread per rank; the contestants take turns in one run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from measurement import compare, gloo, report
from mpi4py import MPI

import mpistrat as ms

MODELS = {"4.2 M": (1024, 4), "25 M": (2048, 6)}  # width and hidden layers
BATCH = 64


def mlp(width: int, layers: int) -> torch.nn.Module:
    torch.manual_seed(0)
    hidden: list[torch.nn.Module] = []
    for _ in range(layers):
        hidden += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    return torch.nn.Sequential(*hidden, torch.nn.Linear(width, 10))


def batch(width: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(MPI.COMM_WORLD.rank)
    x = torch.randn(BATCH, width, generator=generator)
    return x, torch.randint(0, 10, (BATCH,), generator=generator)


def alone(width: int, layers: int) -> Callable[[], object]:
    """The step of one rank that talks to nobody."""
    model = mlp(width, layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = batch(width)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def raw_mpi(width: int, layers: int) -> Callable[[], object]:
    """The loop that people write with mpi4py: gradients into one flat buffer, Allreduce, and back."""
    model = mlp(width, layers)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    x, y = batch(width)
    flat = np.empty(sum(p.numel() for p in parameters), np.float32)
    pieces = torch.from_numpy(flat).split([p.numel() for p in parameters])
    size = MPI.COMM_WORLD.size

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        for piece, parameter in zip(pieces, parameters, strict=True):
            piece.copy_(parameter.grad.view(-1))  # type: ignore[union-attr]
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, flat)
        np.divide(flat, size, out=flat)
        for piece, parameter in zip(pieces, parameters, strict=True):
            parameter.grad.view(-1).copy_(piece)  # type: ignore[union-attr]
        optimizer.step()

    return step


def raw_mpi_views(width: int, layers: int) -> Callable[[], object]:
    """The best of such loops: every `.grad` is a view of the buffer that MPI reduces."""
    model = mlp(width, layers)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    x, y = batch(width)
    flat = np.zeros(sum(p.numel() for p in parameters), np.float32)
    whole = torch.from_numpy(flat)
    pieces = whole.split([p.numel() for p in parameters])
    for piece, parameter in zip(pieces, parameters, strict=True):
        parameter.grad = piece.view(parameter.shape)
    size = MPI.COMM_WORLD.size

    def step() -> None:
        whole.zero_()
        (torch.nn.functional.cross_entropy(model(x), y) / size).backward()
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, flat)
        optimizer.step()

    return step


def with_mpistrat(
    width: int,
    layers: int,
    check: str = "always",
    deterministic: bool = False,
    shared_parameters: bool = False,
) -> Callable[[], object]:
    strategy = ms.MultiWorkerMirroredStrategy(
        gradients="mean",
        check=check,
        deterministic=deterministic,
        shared_parameters=shared_parameters,
    )
    with strategy.scope():
        model = mlp(width, layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = batch(width)

    def replica_step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return lambda: strategy.run(replica_step)


def with_ddp(width: int, layers: int) -> Callable[[], object]:
    """torch DistributedDataParallel on gloo, its TCP store on a free port of this machine."""
    model = torch.nn.parallel.DistributedDataParallel(
        mlp(width, layers), gradient_as_bucket_view=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = batch(width)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--json", help="prefix of the file to write, e.g. benchmarks/results/mpich-"
    )
    prefix = parser.parse_args().json
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with gloo():
        for name, model in MODELS.items():
            contestants = {
                "one rank alone": alone(*model),
                "raw MPI, flat buffer": raw_mpi(*model),
                "raw MPI, .grad in the buffer": raw_mpi_views(*model),
                "mpistrat": with_mpistrat(*model),
                "mpistrat, check=never": with_mpistrat(*model, check="never"),
                "mpistrat, shared_parameters": with_mpistrat(*model, shared_parameters=True),
                "mpistrat, deterministic": with_mpistrat(*model, deterministic=True),
                "DDP, gloo": with_ddp(*model),
            }
            medians = compare(contestants, repeat=5 if name == "4.2 M" else 2)
            ours = medians["mpistrat"]
            rows += [
                {
                    "parameters": name,
                    "training step": who,
                    "ms": us / 1000,
                    "mpistrat / this": ours / us,
                }
                for who, us in medians.items()
            ]
    report("training step of an MLP", rows, prefix and f"{prefix}training_step.json")


if __name__ == "__main__":
    main()
