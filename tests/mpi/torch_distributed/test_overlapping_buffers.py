"""Calls whose results lie in the memory of their inputs, as torch's own groups allow."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from mpi4py import MPI
from torch.distributed import ReduceOp

import mpistrat as ms
from mpistrat.communicators.construction import new_communicator
from mpistrat.communicators.router import Router
from mpistrat.communicators.transports.window import WindowTransport
from mpistrat.torch_distributed.collectives import Collectives

pytestmark = pytest.mark.mpi(min_size=2)

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
NEXT = (RANK + 1) % SIZE
Tensors = Sequence[torch.Tensor]
# Of a tensor of `SIZE` parts and one element more: the results, the inputs, and the call.
Case = tuple[Tensors, Tensors, Callable[[Collectives, Any, Any], None]]


@pytest.fixture(scope="module")
def ways() -> list[Collectives]:
    """Through shared memory, and by messages of MPI."""
    communicator = cast("Router", new_communicator(MPI.COMM_WORLD.Dup()))
    window = cast("WindowTransport", communicator.transports.preferred[0])
    assert window.shared_blocks() is not None
    window.borders = [0]
    by_mpi = communicator.by(ms.CommunicationImplementation.MPI)
    return [Collectives(communicator), Collectives(by_mpi)]


def cases(whole: torch.Tensor) -> dict[str, Case]:
    parts = list(whole[:-1].chunk(SIZE))
    rows = len(parts[0])
    own, other, shifted = parts[RANK], parts[NEXT], whole[1 : rows + 1]
    sum_of = ReduceOp.SUM

    def reduce_scatter(calls: Collectives, outs: Any, ins: Any) -> None:
        calls.reduce_scatter_single(outs[0], ins[0], sum_of)

    def all_gather(calls: Collectives, outs: Any, ins: Any) -> None:
        calls.all_gather_single(outs[0], ins[0])

    def all_to_all(calls: Collectives, outs: Any, ins: Any) -> None:
        calls.all_to_all_single(outs[0], ins[0], (), ())

    return {
        "reduce_scatter into this rank's part": ([own], [whole[:-1]], reduce_scatter),
        "reduce_scatter into parts of two ranks": ([shifted], [whole[:-1]], reduce_scatter),
        "all_gather of this rank's part": ([whole[:-1]], [own], all_gather),
        "all_gather of another rank's part": ([whole[:-1]], [other], all_gather),
        "all_to_all in place": ([whole[:-1]], [whole[:-1]], all_to_all),
        "all_to_all of shifted rows": ([whole[:-1]], [whole[1:]], all_to_all),
        "all_to_all of lists": (parts, parts[::-1], lambda c, outs, ins: c.all_to_all(outs, ins)),
        "all_gather into a list": (
            *(parts, [other]),
            lambda c, outs, ins: c.all_gather([outs], ins),
        ),
        "gather": (
            *(parts, [shifted]),
            lambda c, outs, ins: c.gather([outs] if RANK == 0 else [], ins, 0),
        ),
        "scatter": (
            *([other], parts),
            lambda c, outs, ins: c.scatter(outs, [ins] if RANK == 0 else [], 0),
        ),
        "reduce_scatter of a list": (
            *([other], parts),
            lambda c, outs, ins: c.reduce_scatter(outs, [ins], sum_of),
        ),
        "all_gathers at once, the first over the input of the second": (
            *([whole[:-1], torch.empty(rows * SIZE)], [torch.ones(rows), other]),
            lambda c, outs, ins: c.all_gather_singles(outs, ins),
        ),
        "reduce_scatters at once, likewise": (
            *([own, torch.empty(rows)], [torch.ones(rows * SIZE), whole[:-1]]),
            lambda c, outs, ins: c.reduce_scatter_singles(outs, ins, sum_of),
        ),
    }


@pytest.mark.parametrize("rows", [3, 20_000])
def test_as_with_memory_of_their_own(ways: list[Collectives], rows: int) -> None:
    def whole() -> torch.Tensor:
        return torch.arange(rows * SIZE + 1.0) + RANK

    for calls in ways:
        for name in cases(whole()):
            outs, ins, call = cases(whole())[name]
            call(calls, outs, [tensor.clone() for tensor in ins])
            expected = [out.clone() for out in outs]
            outs, ins, call = cases(whole())[name]
            call(calls, outs, ins)
            torch.testing.assert_close(list(outs), expected, rtol=0, atol=0, msg=name)
