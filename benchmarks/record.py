"""Runs every program behind the recorded results under one MPI, one after the other, and keeps what they write.

scripts/benchmark calls it, in an environment with both MPIs.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

TOP = Path(__file__).parents[1]
sys.path.insert(0, str(TOP / "tests"))

from support.harness.mpi_launcher import MPI_NAMES, Job, Launcher, run_job  # noqa: E402

SECONDS_PER_PROGRAM = 300.0
RESULTS = TOP / "benchmarks" / "results"
BENCH = ("-m", "mpistrat.tools.bench")


def programs(ranks: int, quick: bool) -> Iterator[tuple[str, ...]]:
    """What follows `mpiexec -n 2 python`. PREFIX begins the names of files; `quick`: only whether they run."""
    names = ("overheads", "collectives", "training_step", "checkpoints", "fault_tolerance")
    here = {name: f"benchmarks/{name}.py" for name in names}
    rounds = ("--rounds", "1") if quick else ()
    yield here["overheads"], *rounds, "--json", "PREFIX"
    sizes = ("--maxbytes", "1M") if quick else ()
    yield here["collectives"], *sizes, *rounds, "--json", "PREFIX"
    models = ("--models", "mlp") if quick else ()
    batch = ("--batch-size", str(4 * ranks)) if quick else ()
    yield here["training_step"], *models, *batch, *rounds, "--json", "PREFIX"
    yield here["checkpoints"], *models, *rounds, "--json", "PREFIX"
    models = ("--models", "small") if quick else ()
    yield here["fault_tolerance"], *models, *rounds, "--json", "PREFIX"

    examples = ("--examples", "512") if quick else ()
    yield *BENCH, "input", "overhead", *rounds, "--json", "PREFIXinput_overhead.json"
    yield *BENCH, "input", "throughput", *examples, *rounds, "--json", "PREFIXinput_throughput.json"
    calls = ("--maxbytes", "64K", "--iters", "5") if quick else ()
    yield *BENCH, "all_reduce", "--window", *calls, "--json", "PREFIXsweep.json"
    calls = calls or ("--maxbytes", "16M", "--iters", "20")
    for collective in (
        ("broadcast",) if quick else ("broadcast", "reduce", "all_gather", "reduce_scatter")
    ):
        yield *BENCH, collective, *calls, "--json", f"PREFIXsweep-{collective}.json"

    calls = ("--size", "8", "64K") if quick else ()
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
    runs = [(arguments.ranks, words) for words in programs(arguments.ranks, arguments.quick)]
    runs += [(3, words) for words in programs_with_a_server(arguments.quick, arguments.tensorflow)]
    # Forked ranks need not import torch; to see whether a program runs they will do.
    run_python = functools.partial(launcher.run_python, forked=arguments.quick, cwd=TOP)
    prefix = f"{arguments.folder.resolve()}/{arguments.mpi}"

    failed = []
    for ranks, words in runs:
        program = [word.replace("PREFIX", f"{prefix}-{ranks}-ranks-") for word in words]
        if not succeeds(functools.partial(run_python, ranks, *program), " ".join(words)):
            failed.append(" ".join(words))
    links = {"": (), "bfloat16-": ("--communication-options", "wire_dtype=bfloat16")}
    for name, options in links.items():
        slow = ["benchmarks/slow_link.py", "--mpi", launcher.name, *options]
        slow += ["--json", f"{prefix}-2x2-ranks-{name}"]
        slow += ["--models", "mlp", "--steps", "2"] if arguments.quick else []
        command, environment = [sys.executable, *slow], launcher.environment()
        if not succeeds(functools.partial(run_job, command, environment, cwd=TOP), " ".join(slow)):
            failed.append(" ".join(slow))
        if arguments.quick:
            break
    # It shows what is in results/, so only a run into results/ changes README's picture.
    picture = [sys.executable, "docs/pictures/steps_per_second.py"]
    picture += [str(arguments.folder)] if arguments.folder != RESULTS else []
    if not succeeds(
        functools.partial(run_job, picture, launcher.environment(), cwd=TOP), "picture"
    ):
        failed.append("steps_per_second.py")
    for command_line in failed:
        print(f"FAILED: {command_line}")
    return int(bool(failed))


def succeeds(run: Callable[..., Job], name: str) -> bool:
    """Whether it ends well; what it prints is printed."""
    started = time.monotonic()
    try:
        job = run(seconds=SECONDS_PER_PROGRAM)
    except subprocess.TimeoutExpired:
        print(f"killed after {SECONDS_PER_PROGRAM:g} s: {name}", flush=True)
        return False
    print(job.output if job.returncode else job.stdout, end="")
    print(f"({time.monotonic() - started:.0f} s)", flush=True)
    return job.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
