"""MPISTRAT_TRACE: shows ranges of a strategy, or of a program of `mpistrat run`, on a timeline."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from mpistrat.cluster_resolver.mpi import start_mpi
from mpistrat.communicators.communicator import Communicator
from mpistrat.errors import TopologyError
from mpistrat.settings import trace_folder
from mpistrat.torch_distributed.compilation import not_compiled
from mpistrat.trace import spans


def trace_ranges(communicator: Communicator) -> None:
    """Record ranges (the times of runs, steps and `next`) on the communicator's timeline from now on.

    The timeline is this rank's part of a trace, with the times of its collectives. If the communicator has no timeline,
    nothing is recorded, except in a job of one rank: if MPISTRAT_TRACE names a folder, this function begins a timeline.

    Called by: each rank, in the constructor of a strategy of ranks (`strategy_parts.agree`), or for a new default group
        on our backend.
    Raises: TopologyError if the only rank cannot write to the folder.
    """
    # One rank has nobody to agree with on a folder. It must not ask for its contract, because that imports MPI.
    folder = trace_folder() if communicator.size == 1 else ""
    if folder is None:
        return
    timeline = communicator.contract.timeline
    if timeline is None:
        if not folder:
            return
        from mpistrat.trace import of_process

        mpi = start_mpi()
        rank = 0 if mpi is None else mpi.COMM_WORLD.rank
        size = 1 if mpi is None else mpi.COMM_WORLD.size
        try:
            timeline = of_process.begin(folder, rank, size)
        except OSError as error:
            raise TopologyError(
                f"MPISTRAT_TRACE={folder!r}: rank {rank} cannot write its part of the trace there ({error}); name a "
                "folder that it can make and write to, or unset it"
            ) from None
    from mpistrat.trace import ranges

    ranges.begin(timeline)
    if "torch" in sys.modules:
        spans.current.watch_optimizers(_watch_steps)


def _watch_steps(before: Callable[..., Any], after: Callable[..., Any]) -> None:
    """Register torch's global hooks: every optimizer calls `before` and `after` around each step."""
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    register_optimizer_step_pre_hook(not_compiled(before))
    register_optimizer_step_post_hook(not_compiled(after))
