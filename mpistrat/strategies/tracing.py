"""MPISTRAT_TRACE: shows a strategy's ranges on a timeline."""

from __future__ import annotations

import sys

from mpistrat.cluster_resolver.mpi import start_mpi
from mpistrat.communicators import Communicator
from mpistrat.errors import TopologyError
from mpistrat.settings import trace_folder
from mpistrat.trace import spans


def trace_ranges(communicator: Communicator) -> None:
    """Let the strategy record its ranges (the times of runs, steps and `next`) on the communicator's timeline.

    The timeline is this rank's part of a trace, with the times of its collectives. If the communicator has no timeline,
    nothing is recorded, except in a job of one rank: if MPISTRAT_TRACE names a folder, this function begins a timeline.

    Called by: each rank, in the constructor of a strategy of ranks (`strategy_parts.agree`).
    Raises: TopologyError if the only rank cannot write to the folder.
    """
    timeline = communicator.contract.timeline
    if timeline is None:
        # One rank has nobody to agree with on a folder.
        folder = trace_folder() if communicator.size == 1 else None
        if folder is None:
            return
        from mpistrat.trace import of_process

        mpi = start_mpi()
        rank, size = (0, 1) if mpi is None else (mpi.COMM_WORLD.rank, mpi.COMM_WORLD.size)
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
        from mpistrat.pytorch import hooks

        spans.current.watch_optimizers(hooks.watch_steps)
