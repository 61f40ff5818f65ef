"""Programs of `mpistrat run` in which a collective, or a callback, goes wrong: see test_errors_in_collectives.py."""

import math
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from mpistrat.communicators.collectives.all_reduce import AllReduce
from mpistrat.communicators.node.blocks import Blocks
from mpistrat.communicators.transports.mpi import MpiTransport
from mpistrat.liveness import deadlines


def left_by_an_error() -> None:
    """Rank 0 leaves a sum of ranks 0 and 1, through memory, and then a sum of ranks 0 and 2, by MPI."""
    deadlines.RANK_STAYS_IN_LEFT_COLLECTIVE = 0.2
    deadlines.RANK_WAITS_FOR_MAIN_THREAD_TO_RAISE = 0.2
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([0, 2])]
    for number, smallest in ((1, 0.0), (2, math.inf)):  # bytes that go through memory
        if rank in (0, number):
            group: Any = groups[number - 1]
            window = group.communicator.transports.preferred[0]
            window.shared_blocks()
            window.borders = [smallest]

    def failing(*_: Any) -> None:
        raise MemoryError("no memory\nfor 3 GB of messages")

    if rank == 0:
        Blocks.all_reduce = failing  # type: ignore[method-assign]
        MpiTransport.moves = {**MpiTransport.moves, AllReduce: failing}
    for number in (1, 2):
        if rank in (0, number):
            began = time.monotonic()
            try:
                dist.all_reduce(torch.ones(20_000), group=groups[number - 1])  # the sum
            except Exception as error:
                print(f"rank {rank} got {type(error).__name__}: {error}", flush=True)
                assert time.monotonic() - began < 0.5 + rank
            if number == 1:  # rank 1 has said so before rank 2 ends the job
                (dist.recv if rank == 0 else dist.send)(torch.ones(1), 1 - rank)
    time.sleep(60)


def waits_in_a_callback() -> None:
    """All ranks wait, in a callback, for a call that can begin when the callback has ended."""
    later: list[torch.futures.Future[Any]] = []

    def waits(done: torch.futures.Future[Any]) -> Any:
        while not later:
            time.sleep(0.01)
        return later[0].wait()

    first: Any = dist.all_reduce(torch.ones(1), async_op=True)  # the first
    result = first.get_future().then(waits)
    second: Any = dist.all_reduce(torch.ones(1), async_op=True)
    later.append(second.get_future())
    result.wait()  # here


dist.init_process_group()
globals()[sys.argv[1]]()
