"""Runs every program behind the recorded results under one MPI, one after the other, and keeps what they write.

scripts/benchmark calls it, in an environment with both MPIs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TOP = Path(__file__).parents[1]
sys.path.insert(0, str(TOP / "tests"))

from support.harness.mpi_launcher import MPI_NAMES, Job, Launcher, run_job  # noqa: E402

SECONDS_PER_PROGRAM = 300.0
RESULTS = TOP / "benchmarks" / "results"
BENCH = ("-m", "mpistrat.tools.bench")


def programs(ranks: int, quick: bool) -> Iterator[tuple[str, ...]]:
    """What follows `mpiexec -n 2 python`. PREFIX begins the names of files; `quick`: only whether they run."""

    def if_quick(*words: str) -> tuple[str, ...]:
        return words if quick else ()

    names = ("overheads", "collectives", "training_step", "checkpoints", "fault_tolerance")
    here = {name: f"benchmarks/{name}.py" for name in names}
    rounds = if_quick("--rounds", "1")
    yield here["overheads"], *rounds, "--json", "PREFIX"
    sizes = if_quick("--maxbytes", "1M")
    yield here["collectives"], *sizes, *rounds, "--json", "PREFIX"
    models = if_quick("--models", "mlp")
    batch = if_quick("--batch-size", str(4 * ranks))
    yield here["training_step"], *models, *batch, *rounds, "--json", "PREFIX"
    yield here["checkpoints"], *models, *rounds, "--json", "PREFIX"
    models = if_quick("--models", "small")
    yield here["fault_tolerance"], *models, *rounds, "--json", "PREFIX"

    examples = if_quick("--examples", "512")
    yield *BENCH, "input", "overhead", *rounds, "--json", "PREFIXinput_overhead.json"
    yield *BENCH, "input", "throughput", *examples, *rounds, "--json", "PREFIXinput_throughput.json"
    calls = if_quick("--maxbytes", "64K", "--iters", "5")
    yield *BENCH, "all_reduce", "--window", *calls, "--json", "PREFIXsweep.json"
    calls = calls or ("--maxbytes", "16M", "--iters", "20")
    collectives = ["broadcast"]
    if not quick:
        collectives += ["reduce", "all_gather", "reduce_scatter"]
    for collective in collectives:
        yield *BENCH, collective, *calls, "--json", f"PREFIXsweep-{collective}.json"

    calls = if_quick("--size", "8", "64K")
    yield *BENCH, "compare", "torch", *calls, *rounds, "--json", "PREFIXtorch.json"

    # Few of ResNet-50's pictures, of which a core computes about three in a second.
    batches = {"mlp": 64, "mlp-large": 64, "resnet50": 4, "transformer": 16}
    if quick:
        batches = {"mlp": 4}
    for model in batches:
        work = ("--model", model, "--batch-size", str(batches[model] * ranks))
        turns = rounds or ("--rounds", "5")
        yield *BENCH, "compare", "train", *work, *turns, "--json", f"PREFIX{model}.json"
    for model in batches:
        work = ("--model", model, "--batch-size", str(batches[model] * ranks))
        steps = ("--steps", "2" if quick else "20")
        yield *BENCH, "train", *work, *steps, "--json", f"PREFIXtrain-{model}.json"


def programs_with_a_server(quick: bool, tensorflow: str) -> Iterator[tuple[str, ...]]:
    """What follows `mpiexec -n 3 python`: a server, a worker, and the chief or another worker."""
    rounds = ("--rounds", "1") if quick else ()
    works = ("--works", "sparse", "empty") if quick else ()
    work = ("benchmarks/parameter_server.py", "--tensorflow", tensorflow, *works)
    yield *work, *rounds, "--json", "PREFIX"
    bounds = (("--max-staleness", "0"), ("--max-staleness", "4"))
    for bound in ((), *bounds[quick:]):
        yield "benchmarks/slow_worker.py", *bound, *rounds, "--json", "PREFIX"


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/benchmark", description=__doc__)
    names = {name.lower().replace(" ", ""): name for name in MPI_NAMES}
    parser.add_argument("mpi", choices=names, nargs="?", default="mpich")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument(
        "--tensorflow",
        metavar="PYTHON",
        default=sys.executable,
        help="which has TensorFlow, for parameter_server.py (this)",
    )
    parser.add_argument("--quick", action="store_true", help="sees whether all programs run")
    arguments = parser.parse_args()
    launcher = Launcher.named(names[arguments.mpi])
    arguments.folder.mkdir(parents=True, exist_ok=True)
    quick: bool = arguments.quick
    runs = [(arguments.ranks, words) for words in programs(arguments.ranks, quick)]
    runs += [(3, words) for words in programs_with_a_server(quick, arguments.tensorflow)]
    prefix = f"{arguments.folder.resolve()}/{arguments.mpi}"

    failed = []
    for ranks, words in runs:
        name = " ".join(words)
        program = [word.replace("PREFIX", f"{prefix}-{ranks}-ranks-") for word in words]
        # Forked ranks need not import torch; to see whether a program runs they will do.
        if not succeeds(name, launcher.run_python, ranks, *program, forked=quick):
            failed.append(name)
    links = {"": (), "bfloat16-": ("--communication-options", "wire_dtype=bfloat16")}
    for link, options in links.items():
        slow = ["benchmarks/slow_link.py", "--mpi", launcher.name, *options]
        slow += ["--json", f"{prefix}-2x2-ranks-{link}"]
        if quick:
            slow += ["--models", "mlp", "--steps", "2"]
        name = " ".join(slow)
        if not succeeds(name, run_job, [sys.executable, *slow], launcher.environment()):
            failed.append(name)
        if quick:
            break
    # It shows what is in results/, so only a run into results/ changes README's picture.
    picture = [sys.executable, "docs/pictures/steps_per_second.py"]
    if arguments.folder != RESULTS:
        picture.append(str(arguments.folder))
    if not succeeds("picture", run_job, picture, launcher.environment()):
        failed.append("steps_per_second.py")
    for command_line in failed:
        print(f"FAILED: {command_line}")
    return int(bool(failed))


def succeeds(name: str, run: Callable[..., Job], *arguments: Any, **options: Any) -> bool:
    """Whether `run` with these arguments ends well; what it prints is printed."""
    started = time.monotonic()
    try:
        job = run(*arguments, **options, seconds=SECONDS_PER_PROGRAM, cwd=TOP)
    except subprocess.TimeoutExpired:
        print(f"killed after {SECONDS_PER_PROGRAM:g} s: {name}", flush=True)
        return False
    print(job.output if job.returncode else job.stdout, end="")
    print(f"({time.monotonic() - started:.0f} s)", flush=True)
    return job.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
