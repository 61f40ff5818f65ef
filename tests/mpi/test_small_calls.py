"""Small calls of every kind on one node: they travel with the agreement, and their results are as any other's."""

import random
import time

import numpy as np
import pytest
import torch
from mpi4py import MPI

from mpistrat.communicators.construction import communicator_for
from mpistrat.communicators.node.slots import LARGEST
from mpistrat.communicators.node.small_calls import largest_combined
from mpistrat.communicators.transports.mpi import MpiTransport
from mpistrat.communicators.transports.window import WindowTransport
from mpistrat.errors import CollectiveMismatchError
from support.rank_errors import errors_of_ranks

pytestmark = pytest.mark.mpi(min_size=2)

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
LAST = SIZE - 1


@pytest.fixture(scope="module")
def communicator():
    communicator = communicator_for(WORLD)
    communicator.all_reduce(np.zeros(1 << 18))  # measures, once
    return communicator


@pytest.fixture
def moved(monkeypatch):
    """The names of the calls that transports were asked to move."""
    calls, seen = [], []
    choose, move = WindowTransport.choose, MpiTransport.move

    def note(collective):
        if all(collective is not other for other in seen):
            seen.append(collective)
            calls.append(collective.name)

    def noting_choose(self, collective):
        note(collective)
        return choose(self, collective)

    def noting_move(self, collective):
        note(collective)
        return move(self, collective)

    monkeypatch.setattr(WindowTransport, "choose", noting_choose)
    monkeypatch.setattr(MpiTransport, "move", noting_move)
    return calls


# Each makes a call of about `length` elements of 4 bytes, and looks at what comes out. `number` is equal on all ranks.


def content(rank, length, number):
    return (np.arange(length, dtype=np.int32) * 7 + 13 * rank + number) % 251


def all_reduce(c, length, number):
    buffer = content(c.rank, length, number)
    c.all_reduce(buffer, ("sum", "max", "bxor")[number % 3])
    combine = (np.add, np.maximum, np.bitwise_xor)[number % 3]
    assert (buffer == combine.reduce([content(r, length, number) for r in range(c.size)])).all()


def reduce(c, length, number):
    root, buffer = number % c.size, content(c.rank, length, number)
    c.reduce(buffer, root)
    everyone = [content(r, length, number) for r in range(c.size)]
    assert (buffer == (sum(everyone) if c.rank == root else everyone[c.rank])).all()


def reduce_scatter(c, length, number):
    rows = length // c.size
    out = torch.zeros(rows, dtype=torch.int32)
    c.reduce_scatter(torch.from_numpy(content(c.rank, rows * c.size, number)), out)
    total = sum(content(r, rows * c.size, number) for r in range(c.size))
    assert (out.numpy() == total[c.rank * rows : (c.rank + 1) * rows]).all()


def broadcast(c, length, number):
    root, buffer = number % c.size, content(c.rank, length, number)
    c.broadcast(buffer, root)
    assert (buffer == content(root, length, number)).all()


def all_gather(c, length, number):
    """Of a row more on each rank."""
    parts = c.all_gather(torch.from_numpy(content(c.rank, length + c.rank, number)))
    for rank, part in enumerate(parts):
        assert (part.numpy() == content(rank, length + rank, number)).all()
        assert part.shape == (length + rank,)


def all_gather_into(c, length, number):
    out = np.zeros((c.size, length), np.int32)
    own = content(c.rank, length, number)
    if number % 2:
        out[c.rank] = own
        own = out[c.rank]
    c.all_gather_into(own, out)
    assert all((out[rank] == content(rank, length, number)).all() for rank in range(c.size))


def all_to_all(c, length, number):
    """Half of the time with other counts for each pair of ranks."""

    def rows(sender, receiver):
        alike = 0 if number % 2 else (5 * sender + 3 * receiver + number) % 7
        return max(0, length // c.size - alike)

    sent = [rows(c.rank, rank) for rank in range(c.size)]
    received = [rows(rank, c.rank) for rank in range(c.size)]
    pieces = [content(c.rank, count, number + rank) for rank, count in enumerate(sent)]
    out = np.zeros(sum(received), np.int32)
    c.all_to_all(np.concatenate(pieces), out, sent, received)
    expected = [content(rank, count, number + c.rank) for rank, count in enumerate(received)]
    assert (out == np.concatenate(expected)).all()


CALLS = [all_reduce, reduce, reduce_scatter, broadcast, all_gather, all_gather_into, all_to_all]
every_call = pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)


def largest(call):
    """The `length` of the largest such call that travels with the agreement, if it is a multiple of SIZE."""
    elements = (largest_combined(SIZE) if call in (all_reduce, reduce) else LARGEST) // 4
    return elements - LAST if call is all_gather else elements // SIZE * SIZE


@every_call
def test_no_transport_moves_them(communicator, moved, call):
    for length in (0, 1, SIZE, 1000, largest(call)):
        for number in range(3):
            call(communicator, length, number)
    assert moved == []


@every_call
def test_what_is_larger_goes_another_way(communicator, moved, call):
    for number in (1, 3):
        call(communicator, largest(call) + SIZE, number)
    assert moved == [call.__name__] * 2


@every_call
@pytest.mark.parametrize("nbytes", [1 << 12, 1 << 15, 1 << 16, 1 << 20])
def test_sizes_about_the_limits(communicator, call, nbytes):
    for length in (nbytes // 4 - SIZE, nbytes // 4, nbytes // 4 + 1):
        call(communicator, length, length)


def test_limits_of_sums():
    """A rank reads the buffers of all ranks, 128 KB at most where they are few."""
    assert [largest_combined(ranks) >> 10 for ranks in (1, 2, 3, 4, 8, 32, 1000)] == [
        *(64, 64, 42, 32),
        *(16, 4, 4),
    ]


def test_calls_one_after_another_of_ranks_that_are_late(communicator):
    """A slot is not written again before all have read it, whoever is late. Groups of ranks overlap."""
    groups = [communicator, communicator.split(RANK // 2), communicator.split((RANK + 1) // 2)]
    alike, own = random.Random(3), random.Random(RANK)
    sizes = [0, 1, 5, 100, 1 << 10, 1 << 13, (1 << 14) - 3, 1 << 14, (1 << 14) + 5]
    for number in range(400):
        if own.random() < 0.02:
            time.sleep(own.random() * 0.003)
        call, length, of = alike.choice(CALLS), alike.choice(sizes), alike.choice((0, 0, 1, 2))
        if groups[of].size > 1:
            call(groups[of], length, number)
    communicator.contract.parts.clear()


def test_one_rank_s_buffer_does_not_fit(communicator, moved):
    """All ranks see that, and a transport moves the call; the next one is small again."""
    rows = LARGEST // 8 + 1 if RANK == LAST else 3
    for _ in range(2):
        parts = communicator.all_gather(np.full(rows, RANK, np.int64))
        assert [len(part) for part in parts] == [3] * LAST + [LARGEST // 8 + 1]
        assert all((part == rank).all() for rank, part in enumerate(parts))
        sent = [rows if RANK == LAST and rank == 0 else 0 for rank in range(SIZE)]
        received = [LARGEST // 8 + 1 if RANK == 0 and rank == LAST else 0 for rank in range(SIZE)]
        out = np.zeros(sum(received), np.int64)
        communicator.all_to_all(np.full(sum(sent), RANK, np.int64), out, sent, received)
        assert (out == LAST).all()
        all_to_all(communicator, 10, 0)
        all_gather(communicator, 10, 0)
    assert moved == ["all_gather", "all_to_all"] * 2


def test_scalars_and_many_dimensions(communicator, moved):
    scalar = torch.tensor(float(RANK))
    assert [float(part) for part in communicator.all_gather(scalar)] == list(range(SIZE))
    assert communicator.all_gather(scalar)[0].shape == ()
    deep = np.full((1,) * 30 + (RANK,), RANK)
    assert [part.shape[-1] for part in communicator.all_gather(deep)] == list(range(SIZE))
    assert moved == []


@pytest.mark.parametrize("rows", [1, 1 << 15])
def test_counts_that_do_not_fit_together(communicator, rows):
    """The last rank expects a row of the first that this does not send."""
    counts = [rows] * SIZE
    expected = [rows + (RANK == LAST and rank == 0) for rank in range(SIZE)]

    def exchange():
        out = np.zeros(sum(expected), np.int64)
        communicator.all_to_all(np.ones(rows * SIZE, np.int64), out, counts, expected)
        communicator.barrier()  # where the others learn of it

    errors = errors_of_ranks(exchange)
    assert {name for name, _, _ in errors} == {CollectiveMismatchError.__name__}
    assert f"rank {LAST} expected {[rows + 1] + [rows] * LAST} rows" in errors[0][1]
    assert [cause for _, _, cause in errors] == [""] * LAST + ["ValueError"]
    all_to_all(communicator, 100, 0)


def test_wrong_operands_of_a_known_call(communicator):
    """The strides are looked at each time."""
    out = np.zeros(8 * SIZE)
    communicator.all_gather_into(np.zeros(8), out)
    for wrong in (
        lambda: communicator.all_gather_into(np.zeros(16)[::2], out),
        lambda: communicator.all_gather_into(np.zeros(8), np.zeros(16 * SIZE)[::2]),
        lambda: communicator.broadcast(np.zeros(16)[::2]),
    ):
        for name, text, _ in errors_of_ranks(wrong):
            assert name == "ValueError"
            assert "C-contiguous" in text


def test_they_are_recorded_as_any_other_call(communicator):
    for call, text in (
        (broadcast, "broadcast(1, int32, (3,))"),
        (all_gather, "all_gather(int32, 1 dimensions)"),
        (all_to_all, "all_to_all(int32, rows of ())"),
        (all_gather_into, "all_gather_into(int32, (3,))"),
    ):
        call(communicator, 3, 1)
        assert communicator.contract.watch.record.last(1)[0].call == text
