"""What the ranks do to agree, before bytes move and when one of them leaves a collective early."""

import gc
import re
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpistrat as ms
from mpistrat.communicators.collectives.broadcast import Broadcast
from mpistrat.communicators.construction import communicator_for
from mpistrat.communicators.contract.agreement import MessageAgreement, SharedMemoryAgreement
from mpistrat.communicators.contract.contract import Contract
from mpistrat.communicators.router import Router, Transports
from mpistrat.communicators.transports.mpi import MpiTransport
from mpistrat.errors import StallError
from mpistrat.liveness import deadlines
from mpistrat.liveness.records.job_folder import report_of
from mpistrat.liveness.records.record import ABORT, GROUP, RAISE, RING, SINCE, STALLED, WAITED
from support.rank_errors import errors_of_ranks

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
LAST = SIZE - 1
several = pytest.mark.skipif(SIZE == 1, reason="needs 2 MPI ranks or more")
one_node = WORLD.Split_type(MPI.COMM_TYPE_SHARED).size == SIZE


def by_message():
    """A communicator whose ranks do not share a node, as far as it knows."""
    mpi = MpiTransport(WORLD.Dup())
    return Router(Transports(mpi), Contract(mpi, "tests"))


@several
def test_ranks_of_one_node_agree_on_a_board():
    assert one_node
    assert isinstance(communicator_for(WORLD).contract.agreement, SharedMemoryAgreement)
    assert isinstance(by_message().contract.agreement, MessageAgreement)


@several
@pytest.mark.parametrize("strategy", [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy])
def test_check_never_gives_the_same_results(strategy):
    never = strategy(check="never")
    assert never.extended.communicator.contract.agreement is None
    for made in (never, strategy()):
        total = made.reduce("sum", np.arange(3.0) + RANK, axis=None)
        np.testing.assert_array_equal(total, SIZE * np.arange(3.0) + SIZE * LAST / 2)


@several
def test_check_never_does_not_look():
    """Calls that differ in what is only said of them go through."""
    communicator = communicator_for(WORLD, "never")
    assert communicator.all_gather_object(RANK, label=f"from {RANK}") == list(range(SIZE))


@pytest.mark.parametrize("check", ["sometimes", "", None, True])
def test_check_must_be_known(check):
    with pytest.raises(ValueError, match=r"check must be one of \('always', 'never'\), got"):
        ms.MirroredStrategy(check=check)


@several
def test_check_must_be_the_same_on_all_ranks():
    """Also where one of them has made such a strategy before."""
    for _ in range(2):
        errors = errors_of_ranks(
            lambda: ms.MirroredStrategy(check="never" if RANK == LAST else "always")
        )
        assert {name for name, _, _ in errors} == {"CollectiveMismatchError"}, errors
        assert all("always" in text and "never" in text for _, text, _ in errors)


@several
@pytest.mark.parametrize("make", [by_message, lambda: communicator_for(WORLD.Dup())])
def test_who_left_a_collective_does_not_come_back(monkeypatch, make):
    """Its next call would be taken for the one that the others are in."""
    communicator = make()
    monkeypatch.setattr(deadlines, "RANK_SPINS", 0)
    if RANK == 0:
        record, board = communicator.contract.watch.record, communicator.contract.watch.slot
        record.words[STALLED] = record.words[board + GROUP]
        record.words[ABORT] = RAISE
        with pytest.raises(StallError):
            communicator.barrier()
        record.words[ABORT] = 0
        assert communicator.contract.waiting_in is None
        assert not any(board.since for board in record.slots())
        with pytest.raises(RuntimeError, match=r"rank 0: barrier\(\) cannot be called any more"):
            communicator.barrier()
    kept = weakref.ref(communicator.contract)
    WORLD.Barrier()
    if RANK != 0:
        communicator.contract.agreement.agree(1, 1)  # so that the other's request is not left open
    del communicator
    gc.collect()
    if RANK == 0:
        assert kept() is not None  # MPI writes to its words, whatever the program still has


@several
def test_an_error_inside_a_collective_ends_it():
    """Else it would be reported as a stall a minute later."""
    communicator = communicator_for(WORLD).by(ms.CommunicationImplementation.MPI)

    def fails(*_):
        raise TypeError("on all ranks")

    communicator.mpi.moves = {Broadcast: fails}
    try:
        with pytest.raises(TypeError, match="on all ranks"):
            communicator.broadcast(np.ones(1))
    finally:
        del communicator.mpi.moves
    assert communicator.contract.waiting_in is None
    assert not any(board.since for board in communicator.contract.watch.record.slots())
    communicator.broadcast(np.ones(1))


@several
@pytest.mark.parametrize("slowest", [0, LAST])
def test_the_slowest_rank_waits_least(slowest):
    strategy = ms.MultiWorkerMirroredStrategy()
    watch = strategy.extended.communicator.contract.watch
    for second in range(RING):  # earlier tests' waits: some would leave the last minute meanwhile
        watch.record.words[WAITED + second] = 0
    WORLD.Barrier()  # all have left the collectives of the constructor
    if slowest == RANK:
        while not all(words[board + SINCE] for words, board in watch.peers):
            time.sleep(0.01)
        time.sleep(1)
    strategy.reduce("sum", 1.0, axis=None)
    waited = strategy.extended.seconds_waited()
    assert len(waited) == SIZE
    assert waited.index(min(waited)) == slowest
    assert min(waited[:slowest] + waited[slowest + 1 :]) >= 1


def test_alone_nobody_waits():
    alone = ms.MirroredStrategy() if SIZE == 1 else ms.OneDeviceStrategy("cpu")
    assert alone.extended.seconds_waited() == [0.0]


@several
def test_a_call_site_is_the_users_line():
    """Not torch's, whose backward reduces, nor contextlib's, which leaves the scope."""
    strategy = ms.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = torch.nn.Linear(2, 2)

    def step():
        ms.compute_average_loss(
            model(torch.ones(2, 2)).sum(1), global_batch_size=2 * SIZE
        ).backward()

    strategy.run(step)
    entries = strategy.extended.communicator.contract.watch.record.last(4)
    names = [entry.site.rpartition(" in ")[2] for entry in entries if "parameters" in entry.call]
    assert names[:2] == ["step", "step"]
    assert set(names[2:]) == {"test_a_call_site_is_the_users_line"}
    assert all("test_agreement.py:" in entry.site for entry in entries)


@several
def test_a_call_that_follows_another_is_not_compared(monkeypatch):
    """It is counted and recorded as ever, and small calls before and after it read what they should."""
    communicator = communicator_for(WORLD.Dup())
    contract, compared = communicator.contract, []
    agree = contract.agreement.agree
    monkeypatch.setattr(
        contract.agreement, "agree", lambda *call: compared.append(call) or agree(*call)
    )
    large = np.empty(20_000)
    for step in range(4):
        small, large[:] = np.full(3, RANK + step), RANK
        communicator.all_reduce(small)
        with communicator.following():
            for _ in range(1 + step % 2):
                communicator.all_reduce(large, follows=True)
            communicator.all_reduce(np.ones(2), follows=True)
        np.testing.assert_array_equal(small, SIZE * (LAST / 2 + step))
    np.testing.assert_array_equal(large, LAST / 2 * SIZE**2)
    communicator.all_reduce(large, follows=True)  # outside a block
    assert (contract.calls, len(compared)) == (15, 9)
    assert [number for number, _ in compared] == list(range(1, 10))
    assert {entry.call for entry in contract.watch.record.last(3)} == {
        "all_reduce(sum, float64, (20000,))",
        "all_reduce(sum, float64, (2,))",
    }


@several
def test_an_error_before_a_call_that_follows_ends_the_call(monkeypatch):
    """The ranks that wait there hear of the error, and all go on with the same number."""
    monkeypatch.setattr(deadlines, "RANK_STAYS_IN_LEFT_COLLECTIVE", 0.1)
    communicator = communicator_for(WORLD.Dup())
    window = communicator.transports.preferred[0]
    window.shared_blocks()
    window.borders = [0]
    communicator.all_reduce(np.ones(2))

    def following():
        with communicator.following():
            if RANK == LAST:
                raise ZeroDivisionError("of one rank")
            communicator.all_reduce(np.ones(20_000), follows=True)

    with pytest.raises(
        ZeroDivisionError if RANK == LAST else StallError, match="of one rank"
    ) as raised:
        following()
    if RANK != LAST:
        left = rf"rank {LAST} of {SIZE} left collective number 2, which follows another, for ZeroD"
        assert re.match(left, str(raised.value))
    WORLD.Barrier()
    record = communicator.contract.watch.record
    record.words[ABORT] = 0
    if RANK == 0:
        Path(report_of(record.folder)).unlink()
    assert communicator.all_gather_object(communicator.contract.calls) == [2] * SIZE
