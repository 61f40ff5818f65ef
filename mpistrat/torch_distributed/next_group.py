"""The ranks of torch's next default group, and whether there is a default group now."""

from __future__ import annotations

import sys
from typing import Any

# mpi4py's communicator of the ranks that `init_method="mpi://"` is over; None: all of MPI's ranks.
comm: Any = None


def has_default_group(backend: str | None = None) -> bool:
    """Whether there is a default group. Args: backend: of which it has to be; None: any."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return False
    return backend is None or dist.get_backend() == backend
