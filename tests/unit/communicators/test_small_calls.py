"""Small calls, of ranks that are objects of one process here: what each puts into its slot and takes from others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from mpistrat.communicators.collectives.all_gather import AllGather
from mpistrat.communicators.collectives.all_gather_into import AllGatherInto
from mpistrat.communicators.collectives.all_reduce import AllReduce
from mpistrat.communicators.collectives.all_to_all import AllToAll
from mpistrat.communicators.collectives.broadcast import Broadcast
from mpistrat.communicators.collectives.collective import Collective
from mpistrat.communicators.collectives.reduce import Reduce
from mpistrat.communicators.collectives.reduce_scatter import ReduceScatter
from mpistrat.communicators.contract.unchecked import Unchecked
from mpistrat.communicators.node.slots import LARGEST, SharedSlots
from mpistrat.communicators.node.small_calls import TOO_LARGE, SmallCall
from mpistrat.communicators.reduction import SUM, reducing
from mpistrat.communicators.router import KnownCall, Router, Transports

SIZES = (2, 3, 4)


def slots_of(size: int) -> list[SharedSlots]:
    """Each rank's."""
    segments = [np.zeros(SharedSlots.nbytes_for(size), np.uint8) for _ in range(size)]
    return [SharedSlots(segments, rank) for rank in range(size)]


def calls_of(slots: list[SharedSlots], operands: Sequence[Collective]) -> list[SmallCall]:
    made = [own.small_form(of_rank) for of_rank, own in zip(slots, operands, strict=True)]
    assert None not in made
    return [small for small in made if small is not None]


def run(calls: list[SmallCall], operands: Sequence[Collective], odd: int = 0) -> list[Any]:
    """The ranks enter the call; then each takes its result."""
    payloads = [small.payload(own) for small, own in zip(calls, operands, strict=True)]
    for small, payload in zip(calls, payloads, strict=True):
        if small.writes:
            small.own[odd][...] = payload
    of_ranks = zip(calls, operands, payloads, strict=True)
    return [small.take(odd, own, payload) for small, own, payload in of_ranks]


@pytest.fixture(params=SIZES)
def slots(request: pytest.FixtureRequest) -> list[SharedSlots]:
    return slots_of(request.param)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "bfloat16", "float8_e5m2", "complex64"])
def test_bytes_of_any_dtype(slots: list[SharedSlots], dtype: str) -> None:
    size = len(slots)
    buffers = [
        torch.arange(6).reshape(3, 2).add(rank).to(getattr(torch, dtype)) for rank in range(size)
    ]
    expected = torch.stack(buffers).to(torch.complex64)

    outs = [torch.zeros(6 * size, dtype=buffers[0].dtype) for _ in range(size)]
    into = [AllGatherInto(buffer, out) for buffer, out in zip(buffers, outs, strict=True)]
    run(calls_of(slots, into), into)
    for out in outs:
        assert torch.equal(out.to(torch.complex64), expected.reshape(-1))

    gather = [AllGather(buffer[:rank]) for rank, buffer in enumerate(buffers)]
    for parts in run(calls_of(slots, gather), gather, 1):
        for rank, part in enumerate(parts):
            assert part.dtype == buffers[0].dtype
            assert torch.equal(part.to(torch.complex64), expected[rank, :rank])

    broadcast = [Broadcast(buffer, 1) for buffer in buffers]
    run(calls_of(slots, broadcast), broadcast)
    for buffer in buffers:
        assert torch.equal(buffer.to(torch.complex64), expected[1])


def test_rows_to_each_rank(slots: list[SharedSlots]) -> None:
    """Rank r sends r rows to each rank."""
    size = len(slots)
    everyone = tuple(range(size))
    outs = [np.zeros((sum(everyone), 2), np.int64) for _ in range(size)]
    operands = [
        AllToAll(
            np.arange(2 * rank * size).reshape(rank * size, 2) + 100 * rank,
            outs[rank],
            sent=(rank,) * size,
            received=everyone,
        )
        for rank in range(size)
    ]
    calls = calls_of(slots, operands)
    assert run(calls, operands) == [None] * size
    for rank, own in enumerate(operands):
        sent_here = [other.buffer[r * rank : r * rank + r] for r, other in enumerate(operands)]
        assert (outs[rank] == np.concatenate(sent_here)).all()
        assert own.starts is not None
        assert [starts[-1] for starts in own.starts] == [r * size for r in range(size)]

    operands[0].received = tuple(reversed(everyone))  # which nobody sends
    operands[0].out = np.zeros((sum(everyone) + 1, 2), np.int64)
    run(calls, operands)
    assert (operands[0].out == 0).all()


def test_all_ranks_see_that_a_buffer_of_some_rank_is_too_large(slots: list[SharedSlots]) -> None:
    size = len(slots)
    lengths = [1] * (size - 1) + [LARGEST + 1]
    gather = [AllGather(np.zeros(length, np.uint8)) for length in lengths]
    results = run(calls_of(slots, gather), gather)
    assert all(result is TOO_LARGE for result in results)
    for gathered in gather:
        assert gathered.shapes is not None
        assert gathered.shapes.tolist() == [[length] for length in lengths]
    exchange = [
        AllToAll(
            np.zeros(length, np.uint8),
            np.zeros(sum(lengths) if rank == 0 else 0, np.uint8),
            sent=(length, *[0] * (size - 1)),
            received=tuple(lengths) if rank == 0 else (0,) * size,
        )
        for rank, length in enumerate(lengths)
    ]
    results = run(calls_of(slots, exchange), exchange)
    assert all(result is TOO_LARGE for result in results)
    for exchanged in exchange:
        assert exchanged.starts == [[0, *[length] * size] for length in lengths]


@pytest.mark.parametrize("op", ["sum", "max", "min", "prod", "band", "bor", "bxor"])
def test_combined_elements(slots: list[SharedSlots], op: str) -> None:
    size = len(slots)
    values = [np.arange(1, 1 + 2 * size) + rank for rank in range(size)]
    combine = {
        **{"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply},
        **{"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor},
    }[op]
    total = combine.reduce(values)
    sums = [AllReduce(value.copy(), reducing(op)) for value in values]
    run(calls_of(slots, sums), sums)
    assert all((own.buffer == total).all() for own in sums)

    at_root = [Reduce(value.copy(), reducing(op), 1) for value in values]
    run(calls_of(slots, at_root), at_root)
    for rank, own in enumerate(at_root):
        assert (own.buffer == (total if rank == 1 else values[rank])).all()

    for out in (np.zeros(2, int), np.zeros((), int)):
        length = out.size * size
        parts = [ReduceScatter(value[:length], reducing(op), out.copy()) for value in values]
        run(calls_of(slots, parts), parts)
        for rank, part in enumerate(parts):
            assert (part.out == total[rank * out.size :][: out.size].reshape(out.shape)).all()


def test_slots_of_calls_one_after_another_lie_apart() -> None:
    """Whatever the calls put there."""
    slots = slots_of(2)
    pair = [AllGather(np.full(LARGEST, rank, np.uint8)) for rank in range(2)]
    gather = calls_of(slots, pair)
    broadcast = calls_of(slots, [Broadcast(own.buffer) for own in pair])
    parts = []
    for small, own in zip(gather, pair, strict=True):
        small.own[0][...] = small.payload(own)
    for small in broadcast:
        small.own[1][...] = np.full(LARGEST, 9, np.uint8)
    parts = [small.take(0, own, None) for small, own in zip(gather, pair, strict=True)]
    assert all((part == rank).all() for of_rank in parts for rank, part in enumerate(of_rank))


# Known calls


class Agreeing(Unchecked):
    """Of ranks that agree on their calls, and hear of an error."""

    agreement: Any = "by shared memory"

    def raise_together(self, error: Exception) -> NoReturn:
        raise RuntimeError("on all ranks") from error


@pytest.fixture
def known() -> Router:
    return router_with(slots_of(2)[0])


def router_with(slots: SharedSlots | None) -> Router:
    mpi: Any = SimpleNamespace(rank=0, size=2, thread_multiple=False)
    mpi.takes_device_buffers = mpi.ordered_by_streams = False
    return Router(Transports(mpi, slots=slots), Agreeing(), "by MPI")


def find(router: Router, collective: Collective) -> KnownCall:
    """As `make` does."""
    key = collective.key()
    return router.known_calls.get(key) or router.learn(key, collective)


def test_a_call_is_made_once(known: Router) -> None:
    def broadcast(length: int, root: int = 0) -> Any:
        return find(known, Broadcast(np.zeros(length), root))

    first = broadcast(3)
    assert broadcast(3) is first
    assert first.signature.words == ("broadcast", 0, "float64", (3,), "", "by MPI")
    assert broadcast(4) is not first
    assert broadcast(3, 1) is not first
    assert find(known, Broadcast(np.zeros(3), label="label")) is not first
    assert find(known, Broadcast(torch.zeros(3).double())) is not first
    assert find(known, AllGather(np.zeros(3))) is not first
    for length in range(5000):
        broadcast(length)
    assert broadcast(3) is not first  # it was forgotten, and made again
    assert broadcast(3).signature.digest == first.signature.digest


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: AllReduce(np.zeros(3), reducing("mean")),
        lambda: Reduce(np.zeros(3), reducing("band")),
        lambda: AllReduce(np.zeros(3, int), reducing("sum", "", 0.5)),
        lambda: ReduceScatter(np.zeros(3), SUM, np.zeros(2)),
        lambda: AllGatherInto(np.zeros(3), np.zeros(5)),
        lambda: AllToAll(np.zeros(3), np.zeros(3), sent=(1, 1), received=(1, 2)),
    ],
)
def test_wrong_operands_are_errors_on_all_ranks(
    known: Router, wrong: Callable[[], Collective]
) -> None:
    for _ in range(2):  # they are not kept
        with pytest.raises(RuntimeError, match="on all ranks"):
            find(known, wrong())


def test_without_slots_nothing_is_small() -> None:
    for collective in (Broadcast, AllGather, AllReduce):
        assert find(router_with(None), collective(np.zeros(3))).small is None
