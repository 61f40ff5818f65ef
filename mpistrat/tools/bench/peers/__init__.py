"""The peers that mpistrat is compared with. Each peer has a file here, and does the work by its own means.

A file has two functions, `training_steps(work)` and `all_reduces(values)`. Both return a dict of contestants by name. A
contestant of `training_steps` takes a step and returns this rank's loss. A contestant of `all_reduces` sums the values
over the ranks and returns the result.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from mpistrat.tools.bench.errors import CannotTakePart
from mpistrat.tools.bench.rounds import first_reason

Contestants = dict[str, Callable[[], Any]]
# The file here, the package to import, and the peer's name in reports.
PEERS = (
    ("raw_mpi", "mpi4py", "raw MPI"),
    ("torch_distributed", "torch", "torch.distributed"),
    ("horovod", "horovod", "Horovod"),
    ("tensorflow", "tensorflow", "TensorFlow"),
)


def contestants(what: str, *work: Any) -> tuple[Contestants, dict[str, str]]:
    """Return the contestants of all peers by name, and for each peer that is left out the reason.

    Called by: every rank. A peer that one rank cannot use is left out on all ranks, with the lowest such rank's reason.
    Args: what: the function of each peer's file to call: "training_steps" or "all_reduces".   work: its arguments.
    """
    present: Contestants = {}
    left_out: dict[str, str] = {}
    for file, package, name in PEERS:
        found: Contestants = {}
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
