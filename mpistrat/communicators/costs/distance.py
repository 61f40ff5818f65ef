"""How far the cores of a node's ranks are from each other.

Cores that share a cache hand each other memory three times as fast as others. The host of a virtual machine moves its
processors at any time, and the kernel in it does not know. So the distance is measured.
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

NBYTES = 1 << 17  # many, beside Python's own time, and fewer than a core's own cache holds
_TIMES = 10


def distance(segments: Sequence[np.ndarray] | None, rank: int, meet: Callable[[], None]) -> float:
    """Seconds in which this rank writes 128 KB that another has read, and reads 128 KB that the next has just written.

    Collective. It is the median of some times: where ranks take turns on a core, single times are far too short.
    Args:
        segments: memory that the ranks of a node share, NBYTES of each; None where they share none: it is 0 there.
        meet: returns once every rank has called it.
    """
    if segments is None:
        return 0.0
    segment, next_one = segments[rank], segments[(rank + 1) % len(segments)]
    here = np.ones_like(segment)
    seconds = []
    for _ in range(_TIMES):
        began = time.perf_counter()
        segment[:] = here
        written = time.perf_counter() - began
        meet()
        began = time.perf_counter()
        here[:] = next_one
        seconds.append(written + time.perf_counter() - began)
        meet()
    return statistics.median(seconds[1:])  # before the first, nobody has read


def distance_on_node(world: MPI.Intracomm) -> float:
    """This rank's `distance` from the next rank of its node; 0 where it is alone, or shares no memory. Collective."""
    from mpi4py import MPI  # here, because it starts MPI

    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    segments, _ = share(Blocks.NBYTES + NBYTES, node.rank, node.allgather, populate=True)
    far = 0.0
    if segments is not None and node.size > 1:
        meet = Blocks(segments, node.rank, CommunicatorWatch()).tick
        far = distance([segment[-NBYTES:] for segment in segments], node.rank, meet)
    node.Free()
    return far
