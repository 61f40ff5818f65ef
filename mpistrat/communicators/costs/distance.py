"""The distance between the cores of a node's ranks: the seconds that it takes to pass 128 KB from core to core.

Cores that share a cache pass each other memory three times as fast as other cores. The host of a virtual machine may
move its processors at any time, unknown to the kernel in the machine, so the distance must be measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpistrat.communicators.node.blocks import Blocks
from mpistrat.communicators.node.shared_memory import share
from mpistrat.liveness.records.watch import CommunicatorWatch

if TYPE_CHECKING:
    from mpi4py import MPI

# Bytes to copy: so many that Python's own time matters little, and fewer than a core's own cache holds.
NBYTES = 1 << 17
_TIMES = 10


def distance(segments: Sequence[np.ndarray] | None, rank: int, meet: Callable[[], None]) -> float:
    """Return the seconds that this rank needs to write 128 KB, and to read 128 KB that the next rank has just written.

    The result is the median of nine times, because single times are far too short where ranks share a core. Collective.

    Args:
        segments: the shared segment of each rank of a node, NBYTES each; None without shared memory.
        rank: this rank's number.
        meet: waits until every rank has called it.

    Returns: 0.0 without shared memory.
    """
    if segments is None:
        return 0.0
    following = (rank + 1) % len(segments)
    segment = segments[rank]
    next_segment = segments[following]
    here = np.ones_like(segment)
    seconds = []
    for _ in range(_TIMES):
        began = time.perf_counter()
        segment[:] = here
        written = time.perf_counter() - began
        meet()
        began = time.perf_counter()
        here[:] = next_segment
        read = time.perf_counter() - began
        seconds.append(written + read)
        meet()
    return statistics.median(seconds[1:])  # without the first write: no rank had read the memory


def distance_on_node(world: MPI.Intracomm) -> float:
    """Return this rank's `distance` from the next rank of its node, in seconds. Collective over `world`.

    Called by: `mpistrat-doctor` and `mpistrat-bench`, for their reports.

    Returns: 0.0 if the rank is alone on its node, or if the ranks cannot share memory.
    """
    from mpi4py import MPI  # here, because the import starts MPI

    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    segments, _ = share(Blocks.NBYTES + NBYTES, node.rank, node.allgather, populate=True)
    far = 0.0
    if segments is not None and node.size > 1:
        meet = Blocks(segments, node.rank, CommunicatorWatch()).tick
        parts = [segment[-NBYTES:] for segment in segments]
        far = distance(parts, node.rank, meet)
    node.Free()
    return far
