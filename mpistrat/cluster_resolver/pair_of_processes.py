"""Commands that start an MPI job of its own, of two processes, from within a rank.

A process that no launcher starts is an MPI job of one, and two such jobs do not find each other: MPICH 5 and Open MPI 5
both refuse MPI_Comm_join and MPI_Comm_connect between them. So a launcher is called.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpistrat.cluster_resolver.launcher import (
    NODE_NAME,
    OPEN_MPI,
    environment_of_children,
    library_family,
)

# With these, a launcher takes the nodes of the allocation in place of those that it is given.
_OF_SCHEDULERS = re.compile(r"(SLURM|PBS|LSB|SGE|FLUX|OAR|HYDRA_HOST)_|PE_HOSTFILE$")

Command = tuple[list[str], dict[str, str]]


def commands(
    version: str,
    library: str,
    hosts: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> list[Command]:
    """What may start the two processes, the likeliest first, each with its environment; a program's words are appended.

    Args:
        version: the text of MPI_Get_library_version.
        library: the file of the loaded libmpi, "" if unknown. The launcher beside it is its own.
        hosts: two nodes, one for each process; none for both on this node.
    """
    environ = os.environ if environ is None else environ
    inherited = environment_of_children(environ)
    outside = {name: v for name, v in inherited.items() if not _OF_SCHEDULERS.match(name)}
    found: list[Command] = []
    own = Path(library).parent.parent / "bin" / "mpiexec"
    mpiexec = str(own) if library and own.exists() else shutil.which("mpiexec")
    each = 2 // (len(hosts) or 1)
    if mpiexec is not None:
        nodes = list(hosts) or ["localhost"]
        if library_family(version) == OPEN_MPI:
            where = ["--host", ",".join(f"{node}:{each}" for node in nodes)]
        else:
            where = ["-ppn", str(each), "-hosts", ",".join(nodes)]
        # Between nodes it starts its daemons by srun, in a step that has to share this one's cores.
        environment = {**inherited, "SLURM_OVERLAP": "1"} if hosts else outside
        found.append(([mpiexec, "-n", "2", *where], environment))
    if "SLURM_JOB_ID" in environ and (srun := shutil.which("srun")) is not None:
        nodes = [host.split(".")[0] for host in hosts] or [environ.get(NODE_NAME, "")]
        where = [f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}"]
        spread = [f"--ntasks-per-node={each}", "--ntasks=2", "--overlap"]
        found.append(([srun, *where, *spread], inherited))
    return found
