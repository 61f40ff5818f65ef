"""Reductions through shared blocks. Each rank is a thread."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from mpistrat.communicators.collectives.all_reduce import AllReduce
from mpistrat.communicators.node.blocks import PAGE, Blocks
from mpistrat.communicators.reduction.arithmetic import arithmetic_of
from mpistrat.liveness.records.watch import CommunicatorWatch


def test_buffers_that_are_not_contiguous_are_refused() -> None:
    """A result would be lost in a copy."""
    across = np.asfortranarray(np.ones((100, 100), np.float32))
    for buffer in across, torch.ones(100, 100).bfloat16().t()[::2]:
        how = AllReduce(buffer).how()
        with pytest.raises(ValueError, match="expected a C-contiguous buffer"):
            how.flat(buffer)


@pytest.mark.parametrize("root", [None, 1])
def test_a_result_is_written_over_the_pieces_that_were_brought(root: int | None) -> None:
    """No rank writes a cache line of which another rank was the last reader: that costs a request to its core."""
    ranks, length = 3, 3 * (1 << 12)
    segments = [np.zeros(Blocks.NBYTES, np.uint8) for _ in range(ranks)]
    buffers = [np.full(length, 1 + rank, np.uint8) for rank in range(ranks)]

    def of_rank(rank: int) -> None:
        blocks = Blocks(segments, rank, CommunicatorWatch(crowded=True))
        takers = [] if root is None else [root]
        how = arithmetic_of(buffers[rank].dtype, "sum")
        blocks.all_reduce(how, buffers[rank], buffers[rank], None, takers)

    threads = [threading.Thread(target=of_rank, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    totals = [6 if root in (None, rank) else 1 + rank for rank in range(ranks)]
    assert [set(buffer.tolist()) for buffer in buffers] == [{total} for total in totals]
    written = [np.count_nonzero(segment[PAGE:]) for segment in segments]
    assert written == [length * (ranks - 1) // ranks] * ranks
