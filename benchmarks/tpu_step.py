"""A step of TPUStrategy beside one in plain torch_xla, and the sum of ranks' gradients beside a loop of copies and MPI.

    PJRT_DEVICE=CPU python benchmarks/tpu_step.py                 # the step: one rank on one device
    PJRT_DEVICE=CPU mpiexec -n 2 python benchmarks/tpu_step.py    # the sum, from device to device, through host memory

In an environment with torch_xla, such as .venvs/tpu. Every call ends when the devices have done what they were given.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from mpi4py import MPI
from program import program, report
from torch_xla.debug import metrics

import mpistrat as ms
from mpistrat.communicators import reducing
from mpistrat.cross_device_ops.packing import Packer
from mpistrat.tools.bench.models import Model, mlp
from mpistrat.tools.bench.rounds import all_ranks, compare, medians
from mpistrat.tools.bench.training import with_strategy
from mpistrat.tools.bench.work import Step, Work, alone
from mpistrat.xla.lazy_all_reduce import LazyAllReduce

OURS = "mpistrat"
DEVICE = "xla:0"
BATCH = 64
MODELS = {
    "3 x 1024": Model(functools.partial(mlp, 1024, 3), (1, 32, 32), 10),
    "2 x 256": Model(functools.partial(mlp, 256, 2), (1, 16, 16), 10),
}
NUM_VALUES = 2 * (1024 * 1024 + 1024)  # two layers' gradients, of 8.4 MB
ROUNDS = 21


def contestants_of(work: Work) -> dict[str, Callable[[], Step]]:
    return {
        OURS: lambda: with_strategy(work, ms.TPUStrategy(gradients="mean"))[0],
        "torch_xla.compile": lambda: torch_xla.compile(alone(work)),
        "torch_xla.sync": lambda: synced(alone(work)),
    }


def steps(num_rounds: int) -> list[dict[str, Any]]:
    """SGD. `graphs` were compiled for a contestant's first batches, and for smaller ones; the others find the same."""
    rows = []
    for name, model in MODELS.items():
        work = Work(model, BATCH, 0, DEVICE)
        contestants = {}
        graphs: dict[str, list[int]] = {}
        for who, build in contestants_of(work).items():
            contestants[who] = waited_for(build())
            graphs[who] = [graphs_of(contestants[who])]
        before = num_compiled()
        rounds = compare(contestants, num_rounds=num_rounds)
        assert num_compiled() == before
        losses = {who: call().item() for who, call in contestants.items()}
        work.take(model.synthetic_batch(BATCH // 2, seed=1))
        for who, call in contestants.items():
            graphs[who].append(graphs_of(call))
        rows += [
            {
                "MLP": name,
                "step": who,
                "ms": us / 1000,
                "mpistrat / this": median_of_ratios(rounds[OURS], rounds[who]),
                "graphs": " + ".join(str(count) for count in graphs[who]),
                "loss": losses[who],
                "wrong": losses[who] != losses[OURS],
                "samples": [sample / 1000 for sample in rounds[who]],
            }
            for who, us in medians(rounds).items()
        ]
    return rows


def sums(num_rounds: int) -> list[dict[str, Any]]:
    """From gradients on the device to their sum there: what `backward()` does between its two graphs."""
    strategy = ms.TPUStrategy(gradients="mean")
    communicator = strategy.extended.communicator
    if communicator.takes_device_buffers:
        sys.exit("XLA sums over these ranks itself, in the step's graph: nothing goes by the host")
    sums = LazyAllReduce(communicator, lambda flat: flat)
    packer = Packer()
    value = torch.arange(NUM_VALUES) % 3 + 1.0
    (flat,) = xm.send_cpu_data_to_device([value * (communicator.rank + 1)], DEVICE)

    def ours() -> torch.Tensor:
        return sums._sum(packer, flat, reducing(label="gradients"))

    def mpi() -> torch.Tensor:
        there = flat.cpu()
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, there.numpy())
        return xm.send_cpu_data_to_device([there], DEVICE)[0]

    def copies() -> torch.Tensor:
        return xm.send_cpu_data_to_device([flat.cpu()], DEVICE)[0]

    contestants = {
        OURS: waited_for(ours),
        "copies and MPI": waited_for(mpi),
        "copies": waited_for(copies),
    }
    expected = value * sum(range(1, communicator.size + 1))
    rounds = compare(contestants, num_rounds=num_rounds)
    return [
        {
            "sum": name,
            "MB": flat.nbytes / 1e6,
            "ms": us / 1000,
            "mpistrat / this": median_of_ratios(rounds[OURS], rounds[name]),
            "wrong": name != "copies" and not torch.equal(contestants[name]().cpu(), expected),
            "samples": [sample / 1000 for sample in rounds[name]],
        }
        for name, us in medians(rounds).items()
    ]


def synced(step: Step) -> Step:
    def call() -> torch.Tensor:
        loss = step()
        torch_xla.sync()
        return loss

    return call


def waited_for(call: Step) -> Step:
    def wait() -> torch.Tensor:
        result = call()
        xm.wait_device_ops()
        return result

    return wait


def graphs_of(call: Step) -> int:
    """Those that its first calls compile; no later one should."""
    xm.wait_device_ops()
    before = num_compiled()
    for _ in range(3):
        call()
    return num_compiled() - before


def num_compiled() -> int:
    """By this process so far."""
    return metrics.counter_value("UncachedCompile") or 0


def median_of_ratios(ours: list[float], theirs: list[float]) -> float:
    """Of rounds, each of which is as fast as the machine was then."""
    return statistics.median(our / their for our, their in zip(ours, theirs, strict=True))


def main() -> None:
    arguments = program(__doc__, ROUNDS).parse_args()
    path = arguments.json("tpu_step")
    if all_ranks().size == 1:
        report("training step on an XLA device", steps(arguments.rounds), path)
    else:
        report("sums of gradients on XLA devices", sums(arguments.rounds), path)


if __name__ == "__main__":
    main()
