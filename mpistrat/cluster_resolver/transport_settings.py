"""What the user has told MPI about how to move bytes."""

from __future__ import annotations

import os
from collections.abc import Mapping

# UCX_TLS=tcp, FI_PROVIDER=cxi, OMPI_MCA_pml=ob1, MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM=ring
TRANSPORTS = (
    *("UCX_", "FI_", "PSM2_", "PSM3_", "MPICH_", "MPIR_CVAR_", "I_MPI_"),
    *(f"OMPI_MCA_{part}" for part in ("pml", "btl", "mtl", "coll")),
)
# Hydra names the node here, which differs from job to job.
_OF_THE_JOB = "HOSTNAME"


def transport_settings(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    environ = os.environ if environ is None else environ
    return {
        name: environ[name]
        for name in sorted(environ)
        if name.startswith(TRANSPORTS) and not name.endswith(_OF_THE_JOB)
    }
