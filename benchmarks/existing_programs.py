"""Steps per second of scripts/existing_programs, ported to mpistrat and to DistributedDataParallel on gloo.

    python benchmarks/existing_programs.py                       # of the sizes that the originals have
    python benchmarks/existing_programs.py --sizes small --programs vae gpt2

In each round the contestants take turns, each in new processes: mpistrat's ranks by the mpiexec that is found. The
bound is the original, run by as many processes at once, each with its part of the batch: what a step takes that does
not communicate. With shared parameters, a rank's optimizer has its part of the work only, and a step may be faster.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from program import program, report

from mpistrat.tools.bench.rounds import take_turns

TOP = Path(__file__).parents[1]
sys.path.insert(0, str(TOP / "tests"))

from support import unified_diff  # noqa: E402

PROGRAMS = TOP / "scripts" / "existing_programs"
STEP_TIMES = Path(__file__).with_name("step_times.py")
ROUNDS = 5
SECONDS = 300.0  # for a turn
UNTIMED = 3  # the first steps of a process

OURS = "mpistrat"
SHARED = "shared_parameters=True"
LOCAL = "local batch norm"  # which is what DistributedDataParallel has
DDP = "DDP on gloo"
BOUND = "bound"


@dataclass(frozen=True)
class Work:
    """Of one program: its `backward()`s per step, and by size the global batch and other arguments."""

    batch: str
    sizes: Mapping[str, tuple[int, str]]
    backwards: int = 1


WORKS = {
    "mnist": Work(
        "--batch-size",
        {
            "original": (64, "--epochs=2 --channels=32 --image-size=28"),
            "small": (64, "--epochs=8"),
        },
    ),
    "word_language_model": Work(
        "--batch_size",
        {
            "original": (20, "--epochs=2 --words=33278 --emsize=200 --nhid=200"),
            "small": (20, "--epochs=12"),
        },
    ),
    "nanogpt": Work(
        "--batch_size",
        {
            "original": (
                12,
                "--max_iters=40 --gradient_accumulation_steps=1 --block_size=64 --n_layer=4 --n_head=4 --n_embd=128",
            ),
            "small": (12, "--max_iters=120 --gradient_accumulation_steps=1"),
        },
    ),
    "dcgan": Work(
        "--batch-size",
        {
            "original": (64, "--examples=640 --niter=1"),
            "small": (64, "--examples=2560 --niter=1 --ngf=8 --ndf=8"),
        },
        backwards=3,
    ),
    "vae": Work(
        "--batch-size",
        {
            "original": (128, "--examples=9600 --epochs=1"),
            "small": (16, "--examples=3200 --epochs=1"),
        },
    ),
    "gpt2": Work(
        "--batch-size",
        {
            "original": (8, "--examples=128 --epochs=1"),
            "small": (
                8,
                "--examples=800 --epochs=1 --vocab-size=512 --n-positions=32 --n-embd=64 --n-layer=2",
            ),
        },
    ),
    "timm_model": Work(
        "--batch-size",
        {
            "original": (16, "--examples=160 --epochs=1"),
            "small": (16, "--examples=1600 --epochs=1 --model=test_vit --img-size=32"),
        },
    ),
}


def texts(name: str) -> dict[str, str]:
    """By contestant, its program."""
    original = (PROGRAMS / f"{name}.py").read_text(encoding="utf-8")
    ours, theirs = (
        unified_diff.apply((PROGRAMS / f"{path}.diff").read_text(encoding="utf-8"), original)
        for path in (name, f"ddp/{name}")
    )
    strategy = "MultiWorkerMirroredStrategy("
    shared = ours.replace(strategy, f"{strategy}{SHARED}, ")
    found = {DDP: theirs, OURS: ours, SHARED: shared}
    if "ms.convert_sync_batchnorm" in ours:
        found[LOCAL] = ours.replace("ms.convert_sync_batchnorm", "lambda net: net")
    return {**found, BOUND: original}


def seconds_per_step(name: str, size: str, contestant: str, text: str, ranks: int) -> float:
    """A step of new processes, on the slowest rank: the lower quartile, as others use the machine, too."""
    work = WORKS[name]
    batch, more = work.sizes[size]
    if contestant == BOUND:
        batch //= ranks
    with tempfile.TemporaryDirectory() as top:
        file = Path(top, f"{name}.py")
        folder = Path(top, "times")
        file.write_text(text, encoding="utf-8")
        folder.mkdir()
        command = [sys.executable, str(STEP_TIMES), str(folder)]
        command += [str(work.backwards), str(file)]
        command += [f"{work.batch}={batch}", *more.split()]
        run(contestant, command, ranks, Path(top))
        times = [json.loads(path.read_text(encoding="utf-8")) for path in folder.iterdir()]
    quartiles = [statistics.quantiles(steps[UNTIMED:], n=4) for steps in times]
    return max(lower for lower, *_ in quartiles)


def run(contestant: str, command: Sequence[str], ranks: int, top: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    launcher = {}
    commands = [["mpiexec", "-n", str(ranks), *command]]
    if contestant in (DDP, BOUND):
        launcher = {
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": free_port(),
        }
        commands = [list(command)] * ranks
    processes = []
    for rank, words in enumerate(commands):
        folder = top / (str(rank) if contestant == BOUND else "all")  # for what programs save
        folder.mkdir(exist_ok=True)
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if launcher else {}
        with open(top / f"{rank}.log", "w", encoding="utf-8") as log:
            processes.append(
                subprocess.Popen(
                    words,
                    cwd=folder,
                    env={**environment, **launcher, **own},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )
    try:
        codes = [process.wait(SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        logs = ""
        for path in sorted(top.glob("*.log")):
            logs += path.read_text(encoding="utf-8")
        raise RuntimeError(f"{contestant}: {command} ended with exit codes {codes}:\n{logs}")


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def row(name: str, size: str, ranks: int, num_rounds: int) -> dict[str, Any]:
    turns = {
        contestant: functools.partial(seconds_per_step, name, size, contestant, text, ranks)
        for contestant, text in texts(name).items()
    }
    samples = take_turns(turns, num_rounds)
    seconds = {contestant: statistics.median(taken) for contestant, taken in samples.items()}
    return {
        "program": name,
        "size": size,
        **{f"{contestant}, ms": taken * 1000 for contestant, taken in seconds.items()},
        **{
            f"DDP / {contestant}": seconds[DDP] / taken
            for contestant, taken in seconds.items()
            if contestant != DDP
        },
        "samples": samples,
    }


def main() -> None:
    parser = program(__doc__, ROUNDS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--programs", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--sizes", nargs="+", choices=("original", "small"), default=["original"])
    arguments = parser.parse_args()
    rows = [
        row(name, size, arguments.ranks, arguments.rounds)
        for size in arguments.sizes
        for name in arguments.programs
    ]
    title = f"steps of existing programs by {arguments.ranks} ranks"
    report(title, rows, arguments.json("existing_programs"))


if __name__ == "__main__":
    main()
