"""What a PreemptionCheckpointHandler and a DivergenceSentinel add to a training step.

    mpiexec -n 2 python benchmarks/fault_tolerance.py

All take turns in one run, each with a strategy of its own. A step with neither takes part twice: what those two differ
by is what cannot be told here. The sentinel compares in every step; by default it does so in each hundredth.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from program import program, report

import mpistrat as ms
from mpistrat.tools.bench.models import MODELS, Model, mlp
from mpistrat.tools.bench.rounds import all_ranks, compare, medians
from mpistrat.tools.bench.training import STEPS_OF_TRIALS, with_strategy
from mpistrat.tools.bench.work import Step, Work

SMALL = Model(functools.partial(mlp, 16, 1), (1, 4, 4), examples_per_rank=8, classes=10)
NAMES = ("small", "mlp", "mlp-large")
ROUNDS = 31
NEITHER = "neither"


def contestants(work: Work, directory: Path) -> dict[str, Step]:
    def begin() -> tuple[ms.MultiWorkerMirroredStrategy, Step, torch.nn.Module]:
        strategy = ms.MultiWorkerMirroredStrategy(gradients="mean")
        step, module = with_strategy(work, strategy)
        for _ in range(STEPS_OF_TRIALS):
            step()
        return strategy, step, module

    _, neither, _ = begin()
    _, again, _ = begin()
    strategy, step, module = begin()
    with strategy.scope():
        checkpoint = ms.checkpoint.Checkpoint(module=module)
    handler = ms.fault_tolerance.PreemptionCheckpointHandler(
        strategy.cluster_resolver, checkpoint, directory
    )
    watched, compared, _ = begin()
    ms.fault_tolerance.DivergenceSentinel(watched, every=1)
    return {
        NEITHER: neither,
        "neither, again": again,
        "PreemptionCheckpointHandler": lambda: handler.run(step),
        "DivergenceSentinel(every=1)": compared,
    }


def steps(name: str, directory: Path, num_rounds: int) -> list[dict[str, Any]]:
    """A row for each contestant: its median round, and the median of how much longer it took than `NEITHER`'s turn."""
    model = SMALL if name == "small" else MODELS[name]
    work = Work(model, model.examples_per_rank, all_ranks().rank)
    rounds = compare(contestants(work, directory), num_rounds=num_rounds)
    return [
        {
            "model": name,
            "a step with": contestant,
            "ms": us / 1000,
            "more us": statistics.median(
                mine - theirs
                for mine, theirs in zip(rounds[contestant], rounds[NEITHER], strict=True)
            ),
            "ratio": us / medians(rounds)[NEITHER],
            "samples": [sample / 1000 for sample in rounds[contestant]],
        }
        for contestant, us in medians(rounds).items()
    ]


def main() -> None:
    parser = program(__doc__, ROUNDS)
    parser.add_argument("--models", nargs="+", choices=NAMES, default=NAMES)
    arguments = parser.parse_args()
    communicator = all_ranks()
    with tempfile.TemporaryDirectory(prefix="mpistrat-checkpoints-") as own:
        top = Path(communicator.broadcast_object(own))
        rows = [
            row for name in arguments.models for row in steps(name, top / name, arguments.rounds)
        ]
        communicator.barrier()
    report("training step", rows, arguments.json("fault_tolerance"))


if __name__ == "__main__":
    main()
