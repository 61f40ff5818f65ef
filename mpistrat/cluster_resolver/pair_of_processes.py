"""Commands that start another MPI job, of two processes, from within a rank.

A process without a launcher is an MPI job of one process, and two such jobs cannot connect: MPICH 5 and Open MPI 5 both
refuse MPI_Comm_join and MPI_Comm_connect between them. So these commands call a launcher.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from mpistrat.cluster_resolver import launcher
from mpistrat.settings import Environment

# With these variables, a launcher takes the nodes of the allocation instead of the nodes on its command line.
_OF_SCHEDULERS = re.compile(r"(SLURM|PBS|LSB|SGE|FLUX|OAR|HYDRA_HOST)_|PE_HOSTFILE$")

Command = tuple[list[str], dict[str, str]]


def commands(
    version: str, library: str, hosts: Sequence[str] = (), environ: Environment = os.environ
) -> Iterator[Command]:
    """Yield commands that may start an MPI job of two processes: one with mpiexec, then one with srun.

    Called by: `device_memory_proof`, which tries whether MPI can send the memory of a GPU.
    Args:
        version: the text of MPI_Get_library_version.
        library: the path of the loaded libmpi; "" if unknown. If there is a `bin/mpiexec` beside the library's folder,
            the first command uses it.
        hosts: two nodes, one for each process; empty to start both processes on this node.
    Returns: pairs (words of the command, environment); the caller appends the words of the program. No pair if there is
        no mpiexec and, in a Slurm job, no srun.
    """
    beside_library = Path(library).parent.parent / "bin" / "mpiexec"
    is_beside = library != "" and beside_library.exists()
    mpiexec = str(beside_library) if is_beside else shutil.which("mpiexec")
    if mpiexec is not None:
        yield _by_mpiexec(mpiexec, version, hosts, environ)
    if "SLURM_JOB_ID" in environ and (srun := shutil.which("srun")) is not None:
        yield _by_srun(srun, hosts, environ)


def _by_mpiexec(mpiexec: str, version: str, hosts: Sequence[str], environ: Environment) -> Command:
    nodes = hosts or ["localhost"]
    each = 2 // len(nodes)
    if launcher.library_family(version) == launcher.OPEN_MPI:
        placement = ["--host", ",".join(f"{node}:{each}" for node in nodes)]
    else:
        placement = ["-ppn", str(each), "-hosts", ",".join(nodes)]
    environment = launcher.environment_of_children(environ)
    if hosts:
        # Between nodes, mpiexec starts its daemons with srun, and their step must share the cores of this step.
        environment["SLURM_OVERLAP"] = "1"
    else:
        for name in list(environment):
            if _OF_SCHEDULERS.match(name):
                del environment[name]
    return [mpiexec, "-n", "2", *placement], environment


def _by_srun(srun: str, hosts: Sequence[str], environ: Environment) -> Command:
    own_node = environ.get(launcher.NODE_NAME, "")
    nodes = [host.split(".")[0] for host in hosts] or [own_node]
    placement = [f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}"]
    spread = [f"--ntasks-per-node={2 // len(nodes)}", "--ntasks=2", "--overlap"]
    return [srun, *placement, *spread], launcher.environment_of_children(environ)
