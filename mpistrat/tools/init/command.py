"""`mpistrat init`: writes `train.py`, `train.sbatch` for this cluster, and `test_train.py`."""

from __future__ import annotations

import os
import re
import sys
from contextlib import ExitStack
from importlib.resources import files

from mpistrat.cluster_resolver.launcher import OPEN_MPI, environment_of_children
from mpistrat.tools.doctor import cuda_driver, nodes
from mpistrat.tools.doctor.children import ask
from mpistrat.tools.doctor.facts import Launch
from mpistrat.tools.doctor.mpi_library import command_family

_ENDS_AT_ONCE = "# --kill-on-bad-exit: the job ends when a rank fails. Without it, the job may wait for its time limit."
_ENDS_TOGETHER = """\
# --kill-on-bad-exit=0: before the time limit each rank ends with exit code 42; with 1, srun would kill the others then.
# --wait: after the first rank has ended, the other ranks have a minute to end."""
_TEMPLATES = {
    "train.py": "train.py.template",
    "train.sbatch": "cpu.sbatch",
    "test_train.py": "test_train.py.template",
}


def run(folder: str) -> int:
    """Write the three files, and print the next commands. A rank of a job of several ranks writes nothing.

    Args: folder: where to write; made if it is missing.
    Returns: the exit code: 0; 1 if a file is there already or cannot be written; 2 for several ranks. Then no file was
        written.
    """
    launch = nodes.look()
    if launch.of_several:
        if launch.speaks:
            print("mpistrat init: start it once, without mpirun or srun", file=sys.stderr)
        return 2
    here = files("mpistrat.tools.init")
    texts = {name: here.joinpath(source).read_text() for name, source in _TEMPLATES.items()}
    texts["train.sbatch"] = _filled(texts["train.sbatch"], launch)
    there = [name for name in texts if os.path.lexists(os.path.join(folder, name))]
    if there:
        what = f"{', '.join(there)} in {folder}: move {'it' if len(there) == 1 else 'them'} away"
        print(f"mpistrat init: there is {what}, or name another folder", file=sys.stderr)
        return 1
    try:
        os.makedirs(folder, exist_ok=True)
        with ExitStack() as undo:
            for name, text in texts.items():
                with open(os.path.join(folder, name), "x", encoding="utf-8") as file:
                    undo.callback(os.unlink, file.name)
                    file.write(text)
            undo.pop_all()
    except OSError as error:
        print(f"mpistrat init: {error}", file=sys.stderr)
        return 1
    print(f"Wrote {', '.join(texts)} in {folder}. Next, in that folder:")
    print("  mpirun -n 2 python train.py\n  pytest test_train.py\n  sbatch train.sbatch")
    return 0


def _filled(template: str, launch: Launch) -> str:
    """Return the batch script for this cluster. Lines for facts that are not known stay as in the template."""
    facts = _ask("sinfo", "--noheader", "--format=%P|%D|%c|%G").splitlines()
    default = next((line for line in facts if "*|" in line), (facts or ["|2||"])[0])
    partition, count, cores, devices = default.split("|")
    gpus = int((re.findall(r"gpu:(?:\w+:)?(\d+)", devices) or [len(cuda_driver.look().gpus)])[0])
    cpus = int(cores.rstrip("+") or os.cpu_count() or 1)
    tasks = gpus or min(2, cpus)
    modules = os.environ.get("LOADEDMODULES", "").replace(":", " ")
    lines = {
        "on CPUs, on several nodes:   sbatch slurm/cpu.sbatch train.py --epochs 10": "here: sbatch train.sbatch",
        _ENDS_AT_ONCE: _ENDS_TOGETHER,
        " The other scripts of this folder comment only on their differences from this script.": "",
        "--nodes=2": f"--nodes={min(2, int(count))}",
        "--ntasks-per-node=2": f"--ntasks-per-node={tasks}"
        + f"\n#SBATCH --gpus-per-node={gpus}" * (gpus > 0),
        "--cpus-per-task=4": f"--cpus-per-task={max(1, cpus // tasks)}",
        "--output=%x-%j.out": "--output=%x-%j.out\n#SBATCH --open-mode=append\n#SBATCH --requeue",
        'srun --mpi=pmi2 --kill-on-bad-exit=1 python "$@"': f'{_launcher(launch)} python train.py "$@"',
    }
    if partition:
        lines["##SBATCH --partition=compute"] = f"#SBATCH --partition={partition.rstrip('*')}"
    if modules:
        lines["# module load mpich"] = f"module load {modules}"
    if sys.prefix != sys.base_prefix:
        lines["# source ~/environments/train"] = (
            f"# shellcheck source=/dev/null\nsource {sys.prefix}"
        )
    for line, filled in lines.items():
        template = template.replace(line, filled, 1)
    return template


def _launcher(launch: Launch) -> str:
    """Return the command that starts the ranks: srun, with a kind of --mpi that the MPI has; else mpirun."""
    kinds = nodes.types_of_srun(_ask("srun", "--mpi=list"))
    wanted = ["pmix"] if command_family(launch.mpirun_version) == OPEN_MPI else ["pmi2", "pmix"]
    for kind in wanted:
        if kind in (kinds or wanted):
            return f"srun --mpi={kind} --kill-on-bad-exit=0 --wait=60"
    return "mpirun"


def _ask(*command: str) -> str:
    """Return the output of a command of Slurm; "" if there is no such command, or it does not answer."""
    answer = ask(command, nodes.SECONDS_OF_A_COMMAND, environment_of_children())
    return answer.output + answer.errors if not answer.ended else ""
