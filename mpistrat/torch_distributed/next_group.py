"""The ranks of torch's next default group, whether there is one now, and the backend that the program asked for."""

from __future__ import annotations

import sys
from typing import Any

# The mpi4py communicator for `init_method="mpi://"`; None: all of MPI's ranks.
comm: Any = None


def has_default_group() -> bool:
    """Whether torch has a default process group now. Does not import torch."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()


def asked_name(group: Any = None) -> str:
    """Return the name of the backend that the program asked for, if the group's backend is "mpistrat"; else "".

    Does not import torch. Args: group: a process group; None for the default group, if there is one.
    """
    if group is None and has_default_group():
        group = sys.modules["torch.distributed"].group.WORLD
    # torch.compile passes an object that stands for a group.
    group = getattr(group, "real_obj", group)
    return getattr(group, "asked_name", "")
