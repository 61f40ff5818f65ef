"""One training step of an MLP of 4.2 (25) million parameters beside raw MPI, DistributedDataParallel and TensorFlow.

    mpiexec -n 2 python benchmarks/training_step.py

`mpistrat-bench compare train`, and what mpistrat's own settings change. SGD; a batch of 64 per rank, or `--batch-size`
for all ranks together.
"""

from __future__ import annotations

from typing import Any

from program import program, report

from mpistrat.strategies import CentralStorageStrategy
from mpistrat.tools.bench.comparison import compare_training, training_contestants
from mpistrat.tools.bench.training import past_trials, with_mpistrat, work_of

MODELS = {"4.2 M": "mlp", "25 M": "mlp-large"}


def main() -> None:
    parser = program(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS.values(), default=[*MODELS.values()])
    parser.add_argument("--batch-size", type=int)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    for name, model in MODELS.items():
        if model not in arguments.models:
            continue
        work = work_of(model, arguments.batch_size)
        peers, left_out = training_contestants(work)
        contestants = {
            **peers,
            "mpistrat, check=never": with_mpistrat(work, check="never"),
            "mpistrat, deterministic": with_mpistrat(work, deterministic=True),
            "mpistrat, shared_parameters": with_mpistrat(work, shared_parameters=True),
            "mpistrat, CentralStorage": past_trials(
                work, CentralStorageStrategy([work.device], gradients="mean")
            ),
        }
        rows += [
            {"parameters": name, **row} for row in compare_training(contestants, arguments.rounds)
        ]
    report("training step of an MLP", rows, arguments.json("training_step"), left_out)


if __name__ == "__main__":
    main()
