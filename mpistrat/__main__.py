"""The command line of `mpistrat`, also started by `python -m mpistrat`."""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpistrat.tools.doctor.facts import Launch


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name. Called by: every rank; for `trace`, `init` and `verify`, one process.

    Args: arguments: the command line without the program's name; None: that of this process.
    Returns: the exit code: 0; 1 if the command failed, the doctor found a problem, or runs that are verified differ.
    Raises: SystemExit for --version and wrong usage, such as `init` on several ranks, and always for `mpistrat run`.
    """
    words = sys.argv[1:] if arguments is None else [*arguments]
    if words[:1] == ["bench"]:
        return _bench(argparse.Namespace(words=words[1:]))
    top = parser()
    if "".join(words[:1]).endswith(".py"):
        top.error(f"{words[0]} is no command: mpistrat run {words[0]}")
    parsed = top.parse_args(words)
    if "call" not in parsed:
        top.exit(2, top.format_help())
    return parsed.call(parsed)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line. The texts of a command are the docstring of its function.

    The program `shtab` completes the commands in a shell with it: `shtab -s bash mpistrat.__main__.parser`.
    """
    example = "example: mpirun -n 2 mpistrat run train.py"
    what = "Training on the ranks (processes) that mpirun or srun starts."
    top = argparse.ArgumentParser(prog="mpistrat", description=what, epilog=example)
    version = f"mpistrat {sys.modules['mpistrat'].__version__}"  # no import: layers forbid it here
    top.add_argument("--version", action="version", version=version)
    commands = top.add_subparsers(metavar="COMMAND")
    parsers = {}
    for call in (_run, _doctor, _bench, _trace, _init, _verify):
        help, text, epilog = inspect.getdoc(call).split("\n\n")  # type: ignore[union-attr]
        name = call.__name__[1:]
        parsers[name] = commands.add_parser(name, help=help, description=text, epilog=epilog)
        parsers[name].set_defaults(call=call, error=parsers[name].error)
    runs, doctor, _, trace, init, verify = parsers.values()
    runs.usage = "mpistrat run [--keep-backend] (SCRIPT | -m MODULE) [ARGUMENT ...]"
    keeps = "leave the default group on the backend that the program names"
    runs.add_argument("--keep-backend", action="store_true", help=keeps)
    runs.add_argument("-m", dest="module", action="store_true", help="run a module by its name")
    runs.add_argument("program", metavar="SCRIPT or MODULE")
    doctor.add_argument("--json", action="store_true", help="print all facts and findings as JSON")
    trace.add_argument("folder", metavar="FOLDER", help="the folder that MPISTRAT_TRACE named")
    init.add_argument("folder", metavar="FOLDER", nargs="?", default=".", help="where to write (.)")
    for option, default, help in (
        ("-n", 2, "number of ranks to compare with one (2)"),
        ("--steps", 20, "number of optimizer steps to compare (20)"),
        ("--seconds", 600.0, "the longest time of each run, in seconds (600)"),
        ("--against", "", "the program for one process that SCRIPT came from"),
    ):
        verify.add_argument(option, type=type(default), default=default, help=help)
    starts = "start SCRIPT as `mpistrat run` does: a program of torch.distributed"
    verify.add_argument("--run", dest="by_run", action="store_true", help=starts)
    verify.add_argument("script", metavar="SCRIPT")
    for command in (runs, verify):
        rest = command.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT")
        rest.required = False  # else errors name it among the missing
    return top


def _run(parsed: argparse.Namespace) -> int:
    """run a program of torch.distributed on the ranks of MPI

    Runs the program on each rank that mpirun or srun has started. It gets the environment that torchrun would give it,
    and its default process group is on the backend "mpistrat": MPI needs no address and no port. Without a launcher,
    the program is one rank.

    example: mpirun -n 2 mpistrat run train.py --epochs 3
    """
    if not (parsed.module or os.path.exists(parsed.program)):
        parsed.error(f"there is no {parsed.program!r}, seen from {os.getcwd()}")
    from mpistrat.torch_distributed.run import run_program

    how = {"is_module": parsed.module, "keeps_backend": parsed.keep_backend}
    return run_program(parsed.program, parsed.arguments, **how)


def _doctor(parsed: argparse.Namespace) -> int:
    """say what is wrong with this installation, job or cluster, and how to mend it

    Looks at MPI and its launcher, cores and threads, memory, GPUs, Slurm and the network between nodes, and says how to
    mend faults. Start it alone, and then as you start your program. Exit code 0: nothing to fix (warnings do not
    count); 1: a problem; 2: wrong usage.

    example: mpirun -n 8 mpistrat doctor
    """
    from mpistrat.tools.doctor.command import run

    return run(parsed.json)


def _bench(parsed: argparse.Namespace) -> int:
    """measure collectives, training steps and input

    The same as mpistrat-bench, with a parser of its own.

    example: mpirun -n 8 mpistrat bench all_reduce
    """
    from mpistrat.tools.bench.command import main as bench

    return bench(parsed.words, prog="mpistrat bench")


def _trace(parsed: argparse.Namespace) -> int:
    """draw a timeline of a traced job, and say where its time went

    Draws FOLDER/timeline.png, and prints how long each rank waited for others, moved bytes and read input, and which
    rank the others waited for. A job writes its trace to the folder that MPISTRAT_TRACE names.

    example: MPISTRAT_TRACE=traces mpirun -n 2 mpistrat run train.py; mpistrat trace traces
    """
    from mpistrat.tools.timeline import run

    _alone(parsed)
    return run(parsed.folder)


def _init(parsed: argparse.Namespace) -> int:
    """write a training script, a batch script for this cluster, and a test

    Writes train.py, train.sbatch (filled with the facts that the doctor finds about MPI and Slurm) and test_train.py.
    It overwrites no file.

    example: mpistrat init my_training
    """
    from mpistrat.tools.init.command import run

    return run(parsed.folder, _alone(parsed))


def _verify(parsed: argparse.Namespace) -> int:
    """compare a training on several ranks with the same training on one rank

    Runs the program on one rank and on several, each time in a fresh folder, and compares losses, gradients and
    parameters of the first steps. It names the first tensor that differs by more than rounding, and the causes that
    fit. Exit code 0: the runs are equal; 1: they differ; 2: they cannot be compared.

    example: mpistrat verify -n 2 --steps 20 train.py --epochs 3
    """
    from mpistrat.tools.verify.command import run

    parsed.launch = _alone(parsed)
    return run(parsed)


def _alone(parsed: argparse.Namespace) -> Launch:
    """Return the facts of this process's launcher. Raises: SystemExit on each rank of a job of several ranks."""
    from mpistrat.tools.doctor.nodes import look

    launch = look()
    if launch.of_several:
        if launch.speaks:
            parsed.error("start it once, without mpirun or srun")
        sys.exit(2)
    return launch


if __name__ == "__main__":
    sys.exit(main())
