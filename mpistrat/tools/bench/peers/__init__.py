"""The peers that mpistrat is compared with. Each has a file, which does the work by the peer's own means.

A file has two functions, which return contestants by name. A contestant of `training_steps(work)` takes a step and
returns this rank's loss. A contestant of `all_reduces(values)` sums the values over the ranks and returns the result.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from mpistrat.tools.bench.errors import CannotTakePart
from mpistrat.tools.bench.rounds import first_reason

# File here, package to import, what to call it.
PEERS = (
    ("raw_mpi", "mpi4py", "raw MPI"),
    ("torch_distributed", "torch", "torch.distributed"),
    ("horovod", "horovod", "Horovod"),
    ("tensorflow", "tensorflow", "TensorFlow"),
)


def contestants(what: str, *work: Any) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """The contestants of all peers by name, and the peers that are left out, with the reason.

    Called by: every rank; a peer that one rank lacks is left out.
    Args:
        what: "training_steps" or "all_reduces"; `work` are its arguments.
    """
    present: dict[str, Callable[[], Any]] = {}
    left_out: dict[str, str] = {}
    for file, package, name in PEERS:
        found: dict[str, Callable[[], Any]] = {}
        reason = first_reason("" if importlib.util.find_spec(package) else "not installed")
        if not reason:
            try:
                found = getattr(importlib.import_module(f"{__name__}.{file}"), what)(*work)
            except (CannotTakePart, ImportError) as error:
                reason = str(error)
            reason = first_reason(reason)
        if reason:
            left_out[name] = reason
        else:
            present |= found
    return present, left_out
