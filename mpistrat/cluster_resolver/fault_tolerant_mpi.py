"""Whether this job's MPI lets ranks go on when one has failed."""

from __future__ import annotations

import os
from collections.abc import Mapping

from mpistrat.cluster_resolver.launcher import OPEN_MPI, library_family, library_name

# Set by `mpirun --with-ft ulfm`, on each rank: "1"; "true" where somebody sets it by hand
FT_ENABLE = "OMPI_MCA_mpi_ft_enable"


def why_not_fault_tolerant(version: str, environ: Mapping[str, str] | None = None) -> str:
    """Why the death of a rank ends the job; "" where it need not.

    Args: version: the text of MPI_Get_library_version.
    """
    if library_family(version) != OPEN_MPI:
        return (
            f"{library_name(version)} does not let ranks go on when one has failed; Open MPI 5 does"
        )
    enabled = (os.environ if environ is None else environ).get(FT_ENABLE, "0")
    if enabled.lower() in ("1", "true", "yes", "on", "enabled"):
        return ""
    return "it was not started with `mpirun --with-ft ulfm`, Open MPI's way of surviving the loss of a rank"
