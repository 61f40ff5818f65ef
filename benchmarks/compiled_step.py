"""The first step of a `torch.compile`d training step, with mpistrat and in torch alone: most of it is compilation.

    python benchmarks/compiled_step.py              # one rank
    python benchmarks/compiled_step.py --ranks 2    # by the mpiexec that is found; torch's two do not communicate

Each round has a new process, or new processes, for each contestant in turn, with an empty cache of compiled code.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
from program import program, report

import mpistrat as ms

OURS = "mpistrat"
THEIRS = "torch"
ROUNDS = 5
BATCH = 64
FEATURES = 128
CLASSES = 10


def contestant(name: str) -> None:
    """Train a few steps, and print what the first took."""
    torch.manual_seed(0)
    strategy = ms.MultiWorkerMirroredStrategy(gradients="mean") if name == OURS else None
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = torch.nn.Sequential(
            torch.nn.Linear(FEATURES, FEATURES),
            torch.nn.BatchNorm1d(FEATURES),
            torch.nn.ReLU(),
            torch.nn.Linear(FEATURES, CLASSES),
        )
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(BATCH, FEATURES)
    y = torch.randint(CLASSES, (BATCH,))

    @torch.compile
    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    times = []
    for _ in range(3):
        started = time.perf_counter()
        loss = strategy.run(step) if strategy else step()
        times.append(time.perf_counter() - started)
    if strategy is None or strategy.extended.communicator.rank == 0:
        counters = torch._dynamo.utils.counters
        result = {
            "s": times[0],
            "graphs": counters["stats"]["unique_graphs"],
            "breaks": sum(counters["graph_break"].values()),
            "loss": loss.item(),
        }
        print(json.dumps(result), flush=True)


def run(name: str, ranks: int) -> dict[str, Any]:
    """What the first of new processes prints, with the warnings per process."""
    with tempfile.TemporaryDirectory() as empty:
        launch = [] if ranks == 1 else ["mpiexec", "-n", str(ranks)]
        threads = str(max(1, len(os.sched_getaffinity(0)) // ranks))
        done = subprocess.run(
            [*launch, sys.executable, __file__, "--contestant", name],
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": empty, "OMP_NUM_THREADS": threads},
            capture_output=True,
            text=True,
            check=True,
        )
    result = done.stdout[done.stdout.index("{") :]
    found: dict[str, Any] = json.loads(result.splitlines()[0])
    # W1125 04:26:20.973000 … as torch logs, or as Python warns.
    warnings = re.findall(r"^W\d{4} |Warning: ", done.stderr, re.MULTILINE)
    return {**found, "warnings": len(warnings) / ranks}


def rows(ranks: int, num_rounds: int) -> list[dict[str, Any]]:
    names = (OURS, THEIRS)
    rounds = [{name: run(name, ranks) for name in names} for _ in range(num_rounds)]
    seconds = {name: [taken[name]["s"] for taken in rounds] for name in names}
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    found = []
    for name in names:
        last = rounds[-1][name]
        row = {
            "first step": name,
            "s": medians[name],
            "mpistrat / this": medians[OURS] / medians[name],
            **{key: last[key] for key in ("graphs", "breaks", "warnings", "loss")},
            "wrong": ranks == 1 and rounds[-1][OURS]["loss"] != last["loss"],
            "samples": seconds[name],
        }
        found.append(row)
    return found


def main() -> None:
    parser = program(__doc__, ROUNDS)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--contestant", choices=(OURS, THEIRS), help="is called by this program")
    arguments = parser.parse_args()
    if arguments.contestant:
        contestant(arguments.contestant)
        return
    found = rows(arguments.ranks, arguments.rounds)
    path = arguments.json("compiled_step")
    report(f"first step of torch.compile by {arguments.ranks} ranks at once", found, path)


if __name__ == "__main__":
    main()
