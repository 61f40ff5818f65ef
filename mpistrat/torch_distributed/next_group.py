"""The ranks of torch's next default group, and whether there is a default group now."""

from __future__ import annotations

import sys
from typing import Any

# The mpi4py communicator for `init_method="mpi://"`; None: all of MPI's ranks.
comm: Any = None


def has_default_group(backend: str | None = None) -> bool:
    """Whether torch has a default process group now. Does not import torch.

    Args: backend: the name that the group's backend must have; None for any backend.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return False
    return backend is None or dist.get_backend() == backend
