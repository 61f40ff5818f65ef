"""Small calls, of ranks that are objects of one process here: what each puts into its slot and takes from others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mpistrat.communicators.known_calls import KnownCalls
from mpistrat.communicators.node.slots import LARGEST, SharedSlots
from mpistrat.communicators.node.small_calls import TOO_LARGE, SmallCall, small_call
from mpistrat.communicators.reduction import reducing
from mpistrat.communicators.transport import Operands

SIZES = (2, 3, 4)
PLAIN = ("", "", None)


def slots_of(size: int) -> list[SharedSlots]:
    """Each rank's."""
    segments = [np.zeros(SharedSlots.nbytes_for(size), np.uint8) for _ in range(size)]
    return [SharedSlots(segments, rank) for rank in range(size)]


def calls_of(call: str, slots: list[SharedSlots], operands: list[Operands]) -> list[SmallCall]:
    made = [small_call(call, *of_rank) for of_rank in zip(slots, operands, strict=True)]
    assert None not in made
    return [small for small in made if small is not None]


def run(calls: list[SmallCall], operands: list[Operands], odd: int = 0) -> list[Any]:
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
    operands = [Operands(buffer, out=out) for buffer, out in zip(buffers, outs, strict=True)]
    run(calls_of("all_gather_into", slots, operands), operands)
    for out in outs:
        assert torch.equal(out.to(torch.complex64), expected.reshape(-1))

    operands = [Operands(buffer[:rank]) for rank, buffer in enumerate(buffers)]
    for parts in run(calls_of("all_gather", slots, operands), operands, 1):
        for rank, part in enumerate(parts):
            assert part.dtype == buffers[0].dtype
            assert torch.equal(part.to(torch.complex64), expected[rank, :rank])

    operands = [Operands(buffer, root=1) for buffer in buffers]
    run(calls_of("broadcast", slots, operands), operands)
    for buffer in buffers:
        assert torch.equal(buffer.to(torch.complex64), expected[1])


def test_rows_to_each_rank(slots: list[SharedSlots]) -> None:
    """Rank r sends r rows to each rank."""
    size = len(slots)
    everyone = tuple(range(size))
    outs = [np.zeros((sum(everyone), 2), np.int64) for _ in range(size)]
    operands = [
        Operands(
            np.arange(2 * rank * size).reshape(rank * size, 2) + 100 * rank,
            out=outs[rank],
            sent=(rank,) * size,
            received=everyone,
        )
        for rank in range(size)
    ]
    calls = calls_of("all_to_all", slots, operands)
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


@pytest.mark.parametrize("call", ["all_gather", "all_to_all"])
def test_all_ranks_see_that_a_buffer_of_some_rank_is_too_large(
    slots: list[SharedSlots], call: str
) -> None:
    size = len(slots)
    lengths = [1] * (size - 1) + [LARGEST + 1]
    operands = [
        Operands(
            np.zeros(length, np.uint8),
            out=np.zeros(sum(lengths) if rank == 0 else 0, np.uint8),
            sent=(length, *[0] * (size - 1)),
            received=tuple(lengths) if rank == 0 else (0,) * size,
        )
        for rank, length in enumerate(lengths)
    ]
    results = run(calls_of(call, slots, operands), operands)
    assert all(result is TOO_LARGE for result in results)
    for own in operands:
        if call == "all_gather":
            assert own.shapes is not None
            assert own.shapes.tolist() == [[length] for length in lengths]
        else:
            assert own.starts == [[0, *[length] * size] for length in lengths]


@pytest.mark.parametrize("op", ["sum", "max", "min", "prod", "band", "bor", "bxor"])
def test_combined_elements(slots: list[SharedSlots], op: str) -> None:
    size = len(slots)
    values = [np.arange(1, 1 + 2 * size) + rank for rank in range(size)]
    combine = {
        **{"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply},
        **{"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor},
    }[op]
    total = combine.reduce(values)
    operands = [Operands(value.copy(), reducing(op)) for value in values]
    run(calls_of("all_reduce", slots, operands), operands)
    assert all((own.buffer == total).all() for own in operands)

    operands = [Operands(value.copy(), reducing(op), root=1) for value in values]
    run(calls_of("reduce", slots, operands), operands)
    for rank, own in enumerate(operands):
        assert (own.buffer == (total if rank == 1 else values[rank])).all()

    for out in (np.zeros(2, int), np.zeros((), int)):
        length = out.size * size
        operands = [Operands(value[:length], reducing(op), out.copy()) for value in values]
        run(calls_of("reduce_scatter", slots, operands), operands)
        for rank, own in enumerate(operands):
            assert (own.target == total[rank * out.size :][: out.size].reshape(out.shape)).all()


def test_slots_of_calls_one_after_another_lie_apart() -> None:
    """Whatever the calls put there."""
    slots = slots_of(2)
    pair = [Operands(np.full(LARGEST, rank, np.uint8)) for rank in range(2)]
    gather, broadcast = calls_of("all_gather", slots, pair), calls_of("broadcast", slots, pair)
    parts = []
    for small, own in zip(gather, pair, strict=True):
        small.own[0][...] = small.payload(own)
    for small in broadcast:
        small.own[1][...] = np.full(LARGEST, 9, np.uint8)
    parts = [small.take(0, own, None) for small, own in zip(gather, pair, strict=True)]
    assert all((part == rank).all() for of_rank in parts for rank, part in enumerate(of_rank))


# Known calls


@pytest.fixture
def known() -> KnownCalls:
    return known_by(slots_of(2)[0])


def known_by(slots: SharedSlots | None) -> KnownCalls:
    def raise_together(error: Exception) -> Any:
        raise RuntimeError("on all ranks") from error

    return KnownCalls(2, slots, False, ("by MPI",), raise_together)


def test_a_call_is_made_once(known: KnownCalls) -> None:
    def broadcast(length: int, root: int = 0) -> Any:
        return known.find("broadcast", Operands(np.zeros(length), root=root), PLAIN)

    first = broadcast(3)
    assert broadcast(3) is first
    assert first.signature.words == ("broadcast", 0, "float64", (3,), "", "by MPI")
    assert broadcast(4) is not first
    assert broadcast(3, 1) is not first
    assert known.find("broadcast", Operands(np.zeros(3)), ("", "label", None)) is not first
    assert known.find("broadcast", Operands(torch.zeros(3).double()), PLAIN) is not first
    assert known.find("all_gather", Operands(np.zeros(3)), PLAIN) is not first
    for length in range(5000):
        broadcast(length)
    assert broadcast(3) is not first  # it was forgotten, and made again
    assert broadcast(3).signature.digest == first.signature.digest


@pytest.mark.parametrize(
    "wrong",
    [
        lambda known: known.find("all_reduce", Operands(np.zeros(3)), ("mean", "", None)),
        lambda known: known.find("reduce", Operands(np.zeros(3)), ("band", "", None)),
        lambda known: known.find("all_reduce", Operands(np.zeros(3, int)), ("sum", "", 0.5)),
        lambda known: known.find(
            "reduce_scatter", Operands(np.zeros(3), out=np.zeros(2)), ("sum", "", None)
        ),
        lambda known: known.find("all_gather_into", Operands(np.zeros(3), out=np.zeros(5)), PLAIN),
        lambda known: known.find(
            "all_to_all",
            Operands(np.zeros(3), out=np.zeros(3), sent=(1, 1), received=(1, 2)),
            PLAIN,
        ),
    ],
)
def test_wrong_operands_are_errors_on_all_ranks(
    known: KnownCalls, wrong: Callable[[KnownCalls], Any]
) -> None:
    for _ in range(2):  # they are not kept
        with pytest.raises(RuntimeError, match="on all ranks"):
            wrong(known)


def test_without_slots_nothing_is_small() -> None:
    for call in ("broadcast", "all_gather", "all_reduce"):
        agreed = ("sum" if call == "all_reduce" else "", "", None)
        assert known_by(None).find(call, Operands(np.zeros(3)), agreed).small is None
