"""How long training stands still for an asynchronous checkpoint, beside one copy of the same arrays in memory.

    mpiexec -n 2 python benchmarks/checkpoints.py

Models with Adam's state, in a folder for temporary files; of "linear" there is next to nothing. The copy, and all
checkpoints but the first, go into memory that has been written before.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import Linear

import mpistrat as ms
from mpistrat.tools.bench.report import report
from mpistrat.tools.bench.rounds import ROUNDS, all_ranks
from mpistrat.tools.bench.training import work_of

MODELS = ("linear", "mlp", "mlp-large", "resnet50", "transformer")


def seconds(call: Callable[[], object]) -> float:
    """The slowest rank's."""
    communicator = all_ranks()
    communicator.barrier()
    started = time.perf_counter()
    call()
    return max(communicator.all_gather_object(time.perf_counter() - started))


def pauses(model: str, directory: Path, rounds: int) -> dict[str, Any]:
    strategy = ms.MultiWorkerMirroredStrategy()
    with strategy.scope():
        build = work_of(model, None).model.build if model != "linear" else lambda: Linear(10, 10)
        module = build()
        optimizer = torch.optim.Adam(module.parameters())
        checkpoint = ms.checkpoint.Checkpoint(module=module, optimizer=optimizer)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    manager = ms.checkpoint.CheckpointManager(checkpoint, directory, keep=1)
    moments = [m for state in optimizer.state.values() for m in state.values()]
    arrays = [*module.state_dict().values(), *moments]
    copies = [array.detach().clone() for array in arrays]

    def copy() -> None:
        for one, array in zip(copies, arrays, strict=True):
            one.copy_(array.detach())

    samples: dict[str, list[float]] = {"copy": [], "pause": [], "write": []}
    for number in range(rounds + 1):  # the first takes its memory
        copied = seconds(copy if all_ranks().rank == 0 else lambda: None)
        paused = seconds(lambda: manager.save(wait=False))
        written = seconds(manager.wait)
        if number == 0:
            first = paused * 1e3
        else:
            for name, value in zip(samples, (copied, paused, written), strict=True):
                samples[name].append(value * 1e3)
    middle = {name: statistics.median(times) for name, times in samples.items()}
    return {
        "model": model,
        "arrays": len(arrays),
        "MB": sum(array.nbytes for array in arrays) / 1e6,
        "copy ms": middle["copy"],
        "pause ms": middle["pause"],
        "pause / copy": middle["pause"] / middle["copy"],
        "first pause ms": first,
        "write ms": middle["write"],
        "samples": samples,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument(
        "--json", help="prefix of the file to write, e.g. benchmarks/results/mpich-2-ranks-"
    )
    given = parser.parse_args()
    communicator = all_ranks()
    with tempfile.TemporaryDirectory(prefix="mpistrat-checkpoints-") as own:
        top = Path(communicator.broadcast_object(own))
        rows = [pauses(model, top / model, given.rounds) for model in given.models]
        communicator.barrier()
    report("asynchronous checkpoints", rows, given.json and f"{given.json}checkpoints.json")


if __name__ == "__main__":
    main()
