"""`mpistrat init`: writes `train.py`, `train.sbatch` for this cluster, and `test_train.py`."""

from __future__ import annotations

import os
import re
import shlex
import sys
from contextlib import ExitStack
from importlib.resources import files

from mpistrat.tools.doctor import cuda_driver, nodes
from mpistrat.tools.doctor.facts import Launch
from mpistrat.tools.doctor.mpi_library import command_of_ranks

_NAMES = ("train.py", "train.sbatch", "test_train.py")


def run(folder: str, launch: Launch) -> int:
    """Write the three files, and print the next commands.

    Args:
        folder: where to write; made if it is missing.
        launch: the facts of this process's launcher and of Slurm.
    Returns: the exit code: 0; 1 if a file is there already or cannot be written. Then no file was written.
    """
    there = [name for name in _NAMES if os.path.lexists(os.path.join(folder, name))]
    if there:
        what = f"there is {', '.join(there)} in {folder} already"
        print(f"mpistrat init: {what}: move it away, or name another folder", file=sys.stderr)
        return 1
    try:
        os.makedirs(folder, exist_ok=True)
        with ExitStack() as undo:
            for name in _NAMES:
                text = files("mpistrat.tools.init").joinpath(f"{name}.template").read_text()
                with open(os.path.join(folder, name), "x", encoding="utf-8") as file:
                    undo.callback(os.unlink, file.name)
                    if "sbatch" in name:
                        text = _filled(text, launch.mpirun_version)
                    file.write(text)
            undo.pop_all()
    except OSError as error:
        print(f"mpistrat init: {error}", file=sys.stderr)
        return 1
    print(f"Wrote {', '.join(_NAMES)} in {os.path.abspath(folder)}. Next, in that folder:")
    print("  mpirun -n 2 python train.py\n  pip install pytest\n  python -m pytest test_train.py")
    print("  rm -r checkpoints  # else the job goes on from there\n  sbatch train.sbatch")
    return 0


def _filled(template: str, mpirun_version: str) -> str:
    """Ask Slurm for its nodes and its kinds of --mpi, and return the batch script for this cluster.

    Lines for facts that are not known stay as in the template.
    """
    count, cores, gpus, partition = _nodes()
    tasks = gpus or min(2, cores)
    modules = os.environ.get("LOADEDMODULES", "").replace(":", " ")
    venv = sys.prefix != sys.base_prefix and shlex.quote(sys.prefix)
    for line, filled, is_known in (
        ("Training on CPUs.*", "Start it: sbatch train.sbatch", True),
        (r" The other scripts of this folder.*", "", True),
        ("--nodes=2", f"--nodes={min(2, count)}", True),
        ("(--ntasks-per-node=)2", rf"\g<1>{tasks}\n#SBATCH --gpus-per-node={gpus}", gpus),
        ("--ntasks-per-node=2", f"--ntasks-per-node={tasks}", True),
        ("--cpus-per-task=4", f"--cpus-per-task={max(1, cores // tasks)}", True),
        ("##SBATCH --partition=compute", f"#SBATCH --partition={partition}", partition),
        ("(--output=.*)", r"\1\n#SBATCH --open-mode=append\n#SBATCH --requeue", True),
        ("# module load mpich", f"module load {modules}", modules),
        ("# source ~/environments/train", f"# shellcheck source=/dev/null\nsource {venv}", venv),
        (r"srun --mpi=pmi2 .* python", f"{_launcher(mpirun_version)} python train.py", True),
    ):
        if is_known:
            template = re.sub(line, filled, template, count=1)
    return template


def _nodes() -> tuple[int, int, int, str]:
    """Return the default partition's nodes, its cores and GPUs per node, and its name; without Slurm this machine's."""
    answer = _ask("sinfo", "--noheader", "--format=%P|%D|%c|%G")
    if found := re.search(r"^(.+)\*\|(\d+)\+?\|(\d+)\+?\|(.*)", answer, re.MULTILINE):
        partition, count, cores, kinds = found.groups()
        gpus = 0
        if of_node := re.search(r"gpu:(?:[^:,(]+:)?(\d+)(?=[(,]|$)", kinds):
            gpus = int(of_node[1])
        return int(count), int(cores), gpus, partition
    return 2, len(os.sched_getaffinity(0)), len(cuda_driver.look().gpus), ""


def _launcher(mpirun_version: str) -> str:
    """Return the command that starts the ranks: srun, with a kind of --mpi that the MPI has; else mpirun."""
    types = nodes.types_of_srun(_ask("srun", "--mpi=list")) or ["pmi2", "pmix"]
    launch = Launch(mpirun="mpirun", mpirun_version=mpirun_version, srun_types=types)
    command = " ".join(command_of_ranks(launch))
    if command == "mpirun":
        return command
    return f"{command} --kill-on-bad-exit=0 --wait=60"


def _ask(*command: str) -> str:
    """Return the output of a command of Slurm; "" if there is no such command, or it does not answer."""
    answer = nodes.ask_tool(*command)
    return "" if answer.ended else answer.output + answer.errors
