"""The command line of `mpistrat`, also started by `python -m mpistrat`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name. Called by: every rank; for `trace` and `init`, one process.

    Args: arguments: the command line without the program's name; None: that of this process.
    Returns: the exit code: 0; 1 if the command failed, or the doctor found a problem to fix; 2 for wrong usage.
    Raises: SystemExit for wrong usage and --version, and always for `mpistrat run`.
    """
    words = sys.argv[1:] if arguments is None else [*arguments]
    if words[:1] == ["bench"]:  # it has a parser of its own
        from mpistrat.tools.bench.command import main as bench

        return bench(words[1:], prog="mpistrat bench")
    top, runs = _parsers()
    parsed = top.parse_args(words)
    if parsed.print_completion:
        return _print_completion(top, parsed.print_completion)
    if parsed.command is None:
        top.print_help(sys.stderr)
        return 2
    if parsed.command == "run":
        if not (parsed.module or os.path.exists(parsed.program)):
            runs.error(f"there is no {parsed.program!r}, seen from {os.getcwd()}")
        from mpistrat.torch_distributed.run import run_program

        run_program(
            parsed.program,
            parsed.arguments,
            is_module=parsed.module,
            keeps_backend=parsed.keep_backend,
        )
    if parsed.command == "trace":
        from mpistrat.tools.timeline import run as trace

        return trace(parsed.folder)
    if parsed.command == "init":
        from mpistrat.tools.init.command import run as init

        return init(parsed.folder)

    from mpistrat.tools.doctor.command import run as doctor

    return doctor(parsed.json)


def _parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """Return the parser of the command line, and that of `mpistrat run`."""
    top = argparse.ArgumentParser(
        prog="mpistrat",
        description="Training on the ranks (processes) that mpirun or srun starts.",
        epilog="example: mpirun -n 2 mpistrat run train.py",
    )
    version = f"mpistrat {sys.modules['mpistrat'].__version__}"  # no import: layers forbid it here
    top.add_argument("--version", action="version", version=version)
    top.add_argument(
        "--print-completion",
        metavar="SHELL",
        choices=("bash", "zsh", "tcsh"),
        help="print what completes this command in bash, zsh or tcsh (needs shtab)",
    )
    commands = top.add_subparsers(dest="command", metavar="COMMAND")
    runs = commands.add_parser(
        "run",
        help="run a program of torch.distributed on the ranks of MPI",
        usage="mpistrat run [--keep-backend] (SCRIPT | -m MODULE) [ARGUMENT ...]",
        description="Runs the program on each rank that mpirun or srun has started. It gets the environment that "
        'torchrun would give it, and its default process group is on the backend "mpistrat": MPI needs no address '
        "and no port. Without a launcher, the program is one rank.",
        epilog="example: mpirun -n 2 mpistrat run train.py --epochs 3",
    )
    runs.add_argument(
        "--keep-backend",
        action="store_true",
        help="leave the default group on the backend that the program names",
    )
    runs.add_argument("-m", dest="module", action="store_true", help="run a module by its name")
    runs.add_argument("program", metavar="SCRIPT or MODULE")
    runs.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT")
    doctor = commands.add_parser(
        "doctor",
        help="say what is wrong with this installation, job or cluster, and how to mend it",
        description="Looks at MPI and its launcher, cores and threads, memory, GPUs, Slurm and the network between "
        "nodes, and says how to mend faults. Start it alone, and then as you start your program. Exit code 0: nothing "
        "to fix (warnings do not count); 1: a problem; 2: wrong usage.",
        epilog="example: mpirun -n 8 mpistrat doctor",
    )
    doctor.add_argument("--json", action="store_true", help="print all facts and findings as JSON")
    commands.add_parser(
        "bench", help="measure collectives, training steps and input", add_help=False
    )
    trace = commands.add_parser(
        "trace",
        help="draw a timeline of a traced job, and say where its time went",
        description="Draws FOLDER/timeline.png, and prints how long each rank waited for others, moved bytes and read "
        "input, and which rank the others waited for. A job writes its trace to the folder that MPISTRAT_TRACE names.",
        epilog="example: MPISTRAT_TRACE=traces mpirun -n 2 mpistrat run train.py; mpistrat trace traces",
    )
    trace.add_argument("folder", metavar="FOLDER", help="the folder that MPISTRAT_TRACE named")
    init = commands.add_parser(
        "init",
        help="write a training script, a batch script for this cluster, and a test",
        description="Writes train.py, train.sbatch (filled with the facts that the doctor finds about MPI and Slurm) "
        "and test_train.py. It overwrites no file.",
        epilog="example: mpistrat init my_training",
    )
    init.add_argument("folder", metavar="FOLDER", nargs="?", default=".", help="where to write (.)")
    return top, runs


def _print_completion(top: argparse.ArgumentParser, shell: str) -> int:
    try:
        import shtab
    except ImportError:
        top.error("--print-completion needs shtab: pip install shtab")
    print(shtab.complete(top, shell))
    return 0


if __name__ == "__main__":
    sys.exit(main())
