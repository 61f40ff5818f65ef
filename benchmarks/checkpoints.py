"""How long training stands still for an asynchronous checkpoint, beside one copy of the same arrays in memory.

    mpiexec -n 2 python benchmarks/checkpoints.py

Models with Adam's state, in a folder for temporary files; of "linear" there is next to nothing. The copy, and all
checkpoints but the first, go into memory that has been written before.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from program import program, report
from torch.nn import Linear

import mpistrat as ms
from mpistrat.tools.bench.rounds import all_ranks, medians, seconds_of, take_turns
from mpistrat.tools.bench.training import work_of

MODELS = ("linear", "mlp", "mlp-large", "resnet50", "transformer")


def built(model: str) -> torch.nn.Module:
    if model == "linear":
        return Linear(10, 10)
    return work_of(model, None).model.build()


def pauses(model: str, directory: Path, rounds: int) -> dict[str, Any]:
    communicator = all_ranks()
    strategy = ms.MultiWorkerMirroredStrategy()
    with strategy.scope():
        module = built(model)
        optimizer = torch.optim.Adam(module.parameters())
        checkpoint = ms.checkpoint.Checkpoint(module=module, optimizer=optimizer)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    manager = ms.checkpoint.CheckpointManager(checkpoint, directory, keep=1)
    moments = [m for state in optimizer.state.values() for m in state.values()]
    arrays = [*module.state_dict().values(), *moments]
    copies = [array.detach().clone() for array in arrays]

    def copy_on_rank_0() -> None:
        for copy, array in zip(copies, arrays, strict=True):
            if communicator.rank == 0:
                copy.copy_(array.detach())

    def save() -> object:
        return manager.save(wait=False)

    def milliseconds(call: Callable[[], object]) -> float:
        return seconds_of(communicator, call) * 1e3

    turns = {
        "copy": lambda: milliseconds(copy_on_rank_0),
        "pause": lambda: milliseconds(save),
        "write": lambda: milliseconds(manager.wait),
    }
    first = take_turns(turns, 1)  # takes its memory
    samples = take_turns(turns, rounds)
    middle = medians(samples)
    return {
        "model": model,
        "arrays": len(arrays),
        "MB": sum(array.nbytes for array in arrays) / 1e6,
        "copy ms": middle["copy"],
        "pause ms": middle["pause"],
        "pause / copy": middle["pause"] / middle["copy"],
        "first pause ms": first["pause"][0],
        "write ms": middle["write"],
        "samples": samples,
    }


def main() -> None:
    parser = program(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    arguments = parser.parse_args()
    communicator = all_ranks()
    with tempfile.TemporaryDirectory(prefix="mpistrat-checkpoints-") as own:
        top = Path(communicator.broadcast_object(own))
        rounds = arguments.rounds
        rows = [pauses(model, top / model, rounds) for model in arguments.models]
        communicator.barrier()
    report("asynchronous checkpoints", rows, arguments.json("checkpoints"))


if __name__ == "__main__":
    main()
