"""The command line of `mpistrat`, also started by `python -m mpistrat`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name. Called by: every rank.

    Args: arguments: the command line without the program's name; None: that of this process.
    Returns: the exit code of `mpistrat doctor`: 0, or 1 if there is a problem to fix.
    Raises: SystemExit for wrong usage and --version, and always for `mpistrat run`.
    """
    top = argparse.ArgumentParser(prog="mpistrat")
    version = f"mpistrat {sys.modules['mpistrat'].__version__}"  # no import: layers forbid it here
    top.add_argument("--version", action="version", version=version)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor = commands.add_parser(
        "doctor",
        help="what is wrong with this installation, job or cluster, and what to do about it",
        description="Looks at MPI and its launcher, cores and threads, memory, GPUs, Slurm and the network between "
        "nodes, and says how to mend faults. Start it alone, and then as you start your program: "
        "mpirun -n 8 mpistrat doctor, srun … mpistrat doctor. Exit code 0: nothing to fix (warnings do not count); "
        "1: a problem; 2: wrong usage.",
    )
    doctor.add_argument("--json", action="store_true", help="print all facts and findings as JSON")
    runs = commands.add_parser(
        "run",
        help="run a program of torch.distributed as ranks of MPI: srun mpistrat run train.py",
        usage="mpistrat run [--keep-backend] (SCRIPT | -m MODULE) [ARGUMENT ...]",
        description="Runs the program on each rank that mpirun or srun has started. It gets the environment that "
        'torchrun would give it, and its default process group is on the backend "mpistrat": MPI needs no address '
        "and no port. Without a launcher, the program is one rank.",
    )
    runs.add_argument(
        "--keep-backend",
        action="store_true",
        help="leave the default group on the backend that the program names",
    )
    runs.add_argument("-m", dest="module", action="store_true", help="run a module by its name")
    runs.add_argument("program", metavar="SCRIPT or MODULE")
    runs.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT")
    parsed = top.parse_args(arguments)
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

    from mpistrat.tools.doctor.command import run

    return run(parsed.json)


if __name__ == "__main__":
    sys.exit(main())
