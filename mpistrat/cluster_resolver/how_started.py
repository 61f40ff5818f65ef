"""What the environment says of how this process was started."""

from __future__ import annotations

import os
from collections.abc import Mapping

from mpistrat.cluster_resolver import launcher

_SLURM = ("SLURM_", "SLURMD_NODENAME", "SRUN_CPUS_PER_TASK")
# Of no use for a diagnosis, or nobody's business
_LEFT_OUT = ("SLURM_JWT", "SLURM_CONF", "SLURM_SUBMIT", "SLURM_JOB_USER", "SLURM_JOB_UID")


def claim_of_launcher(environ: Mapping[str, str] | None = None) -> launcher.Claim | None:
    """What a launcher says about this process. Raises: TopologyError when a variable is not a number."""
    return launcher.read_claim(os.environ if environ is None else environ)


def first_on_node(environ: Mapping[str, str] | None = None) -> bool:
    return launcher.is_first_on_node(os.environ if environ is None else environ)


def slurm_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """What Slurm says of job, step and task."""
    environ = os.environ if environ is None else environ
    return {
        name: environ[name]
        for name in sorted(environ)
        if name.startswith(_SLURM) and not name.startswith(_LEFT_OUT)
    }


def environment_of_others(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a child process that is no rank."""
    return launcher.environment_of_children(os.environ if environ is None else environ)
