"""Four ranks of a node, in two groups of an accelerator that start and work at the same time.

Usage: groups_at_once.py [CASE], "halves" or "every second"; without CASE both, and a strategy over all ranks. If MPICH
takes the four ranks for two nodes, that strategy has a group within each node, too. Rank 0 prints "done NAME" for each
case that went well. The accelerator is that of `support.accelerator`.
"""

import sys
from pathlib import Path

import torch
from mpi4py import MPI

import mpistrat as ms
from mpistrat.communicators.transports.accelerator import gpu_transports
from mpistrat.communicators.transports.accelerator.hierarchical import HierarchicalDeviceTransport
from mpistrat.communicators.transports.accelerator.native import NativeTransport

sys.path.insert(0, str(Path(__file__).parents[2]))

from support import accelerator
from support.chosen_transport import chosen_transport

SIM = accelerator.load()
WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
gpu_transports.why_not_proven = lambda *_: "not tried"
HierarchicalDeviceTransport.measure = lambda *_: None  # type: ignore[method-assign]


def sums(strategy: ms.Strategy, ranks: list[int]) -> bool:
    """Sum numbers over the `ranks` of a strategy, a few times. Returns: whether they go by node."""
    communicator = strategy.extended.communicator
    communicator = communicator.by(ms.CommunicationImplementation.HIERARCHICAL)
    for _ in range(3):
        buffer = torch.full((1 << 15,), RANK + 1.0, device=accelerator.KIND)
        mover = chosen_transport(communicator, buffer)
        assert isinstance(mover, NativeTransport | HierarchicalDeviceTransport), mover
        communicator.all_reduce(buffer)
        assert buffer.unique().tolist() == [sum(ranks) + len(ranks)]
    return isinstance(mover, HierarchicalDeviceTransport)


def main() -> None:
    cases = {"halves": [[0, 1], [2, 3]], "every second": [[0, 2], [1, 3]]}
    for name in sys.argv[1:] or cases:
        groups = cases[name]
        own = next(group for group in groups if RANK in group)
        sums(ms.MultiWorkerMirroredStrategy(comm=WORLD.Split(own[0])), own)
        done(name)
    if not sys.argv[1:]:
        by_node = sums(ms.MultiWorkerMirroredStrategy(), [*range(SIZE)])
        done("by node" if by_node else "all alike")
    assert SIM.violations() == []


def done(name: str) -> None:
    WORLD.Barrier()
    if RANK == 0:
        print("done", name, flush=True)


if __name__ == "__main__":
    main()
