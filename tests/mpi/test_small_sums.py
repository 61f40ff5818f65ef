"""Small sums on one node: they travel with the agreement, without a call of MPI's, and are as any other sum."""

import os
import random
import time

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpistrat as ms
from mpistrat.communicators import Reduction, reducing
from mpistrat.communicators.collectives.all_reduce import AllReduce
from mpistrat.communicators.construction import communicator_for
from mpistrat.communicators.node.small_calls import largest_combined
from mpistrat.communicators.transports.mpi import MpiTransport
from mpistrat.errors import CollectiveMismatchError, StallError
from mpistrat.liveness.records.record import ABORT, GROUP, RAISE, STALLED
from support.rank_errors import errors_of_ranks

pytestmark = pytest.mark.mpi(min_size=2)

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
LAST = SIZE - 1
RANKS = np.arange(SIZE)
LARGEST = largest_combined(SIZE)


@pytest.fixture(scope="module")
def communicator():
    return communicator_for(WORLD)


@pytest.fixture
def through_mpi(monkeypatch):
    """The buffers that MPI was given."""
    buffers = []

    def all_reduce(mpi, collective):
        buffers.append(collective.buffer)
        mpi.all_reduce(collective)

    monkeypatch.setattr(MpiTransport, "moves", {**MpiTransport.moves, AllReduce: all_reduce})
    return buffers


@pytest.mark.parametrize(
    "nbytes",
    [
        *(0, 1, 8, 4095, 4096),
        pytest.param(LARGEST - 1, id="largest - 1"),
        pytest.param(LARGEST, id="largest"),
    ],
)
def test_no_message_is_sent(communicator, through_mpi, nbytes):
    buffer = np.full(nbytes, RANK + 1, np.uint8)
    communicator.all_reduce(buffer)
    assert (buffer == SIZE * (SIZE + 1) // 2).all()
    assert through_mpi == []


def test_without_the_check_mpi_sums(through_mpi):
    """There is no agreement to travel with."""
    value = np.ones(3)
    communicator_for(WORLD, "never").all_reduce(value)
    assert value.tolist() == [SIZE] * 3
    assert len(through_mpi) == 1


@pytest.mark.parametrize("way", ["RING", "MPI", "NCCL"])
def test_a_way_that_was_asked_for_is_taken(communicator, through_mpi, way):
    as_asked = communicator.by(ms.CommunicationImplementation[way])
    value = np.ones(3)
    as_asked.all_reduce(value)
    assert value.tolist() == [SIZE] * 3
    assert (
        f"all_reduce(sum, float64, (3,), by {way})"
        in communicator.contract.watch.record.last(1)[0].call
    )
    assert len(through_mpi) == (1 if way == "MPI" else 0)
    if way != "NCCL":  # which is for GPUs, and as AUTO for all else
        assert as_asked.memory.window_buffer(1 << 16) is None


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 5), (2, 1, 7)])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "int8", "float16"])
def test_shapes_of_arrays(communicator, shape, dtype):
    mine = np.full(shape, RANK + 1, dtype)
    out = np.zeros_like(mine)
    communicator.all_reduce(mine, out=out)
    assert (out == SIZE * (SIZE + 1) // 2).all()
    assert out.shape == shape
    assert (mine == RANK + 1).all()
    communicator.all_reduce(mine)
    assert (mine == out).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_tensors(communicator, dtype):
    mine = torch.arange(6).reshape(2, 3).to(dtype) * (RANK + 1)
    out = torch.empty_like(mine)
    communicator.all_reduce(mine, out=out)
    assert torch.equal(out, torch.arange(6).reshape(2, 3).to(dtype) * SIZE * (SIZE + 1) / 2)
    leaf = torch.ones(3, requires_grad=True)
    communicator.all_reduce(leaf)
    assert leaf.tolist() == [SIZE] * 3
    assert leaf.requires_grad


def test_lazy_tensors(communicator):
    """Whose elements are conjugated or negated when they are read: the policy makes them plain."""
    strategy = ms.MultiWorkerMirroredStrategy()
    conjugated = torch.tensor([1 + 2j, 3j]).conj()
    negated = torch.tensor([2 + 3j]).conj().imag
    assert conjugated.is_conj()
    assert negated.is_neg()
    total = strategy.run(lambda: ms.get_replica_context().all_reduce("sum", [conjugated, negated]))
    single = strategy.run(lambda: ms.get_replica_context().all_reduce("sum", negated))
    assert total[0].tolist() == [SIZE * (1 - 2j), SIZE * -3j]
    assert total[1].tolist() == single.tolist() == [-3.0 * SIZE]

    def as_they_are():
        communicator.all_reduce(
            conjugated if RANK == LAST else torch.zeros(2, dtype=conjugated.dtype)
        )

    for name, text, _ in errors_of_ranks(as_they_are):  # the others do not wait for it
        assert name in (CollectiveMismatchError.__name__, RuntimeError.__name__)
        assert "conjugate" in text


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_of_python_numbers_python_numbers(op, deterministic):
    for devices in (None, ["cpu:0", "cpu:1"]):
        strategy = ms.MultiWorkerMirroredStrategy(devices=devices, deterministic=deterministic)

        def step():
            return ms.get_replica_context().all_reduce(op, (3.0, {"a": 2, "b": 1j}))

        for result in strategy.experimental_local_results(strategy.run(step)):
            whole, nested = result
            assert [type(x) for x in (whole, nested["b"])] == [float, complex]
            assert type(nested["a"]) is (int if op == "sum" else float)
        assert type(strategy.reduce(op, strategy.run(lambda: 2.0), axis=None)) is float


@pytest.mark.parametrize("deterministic", [False, True])
def test_results_are_contiguous(deterministic):
    strategy = ms.MultiWorkerMirroredStrategy(deterministic=deterministic)
    value = torch.arange(12.0).reshape(3, 4).t()
    total = strategy.run(lambda: ms.get_replica_context().all_reduce("sum", value))
    assert total.is_contiguous()
    assert torch.equal(total, SIZE * value)


def test_operations_and_scales(communicator):
    for op, expected in (("max", LAST), ("min", 0), ("sum", RANKS.sum())):
        value = np.array([RANK], np.int32)
        communicator.all_reduce(value, op)
        assert value.tolist() == [expected]
    halved = np.array([RANK + 1.0])
    communicator.all_reduce(halved, reducing(scale=0.5))
    assert halved.tolist() == [SIZE * (SIZE + 1) / 4]


def test_float_sums_are_equal_on_all_ranks(communicator):
    """Every rank adds up by itself, in rank order."""
    values = np.random.default_rng(RANK).normal(size=100).astype(np.float32)
    everyone = WORLD.allgather(values)
    expected = everyone[0]
    for other in everyone[1:]:
        expected = expected + other
    communicator.all_reduce(values)
    assert (values == expected).all()


def test_infinities_warn_of_nothing(communicator):
    value = np.array([np.inf if RANK % 2 else -np.inf, np.finfo(np.float32).max], np.float32)
    with np.errstate(all="raise"):
        communicator.all_reduce(value)
    assert np.isnan(value[0])
    assert np.isinf(value[1])


def test_many_calls_of_all_kinds_with_late_ranks(communicator):
    """A slot is not written again before all have read it, whatever call comes in between, and whoever is late."""
    alike, own = random.Random(5), random.Random(RANK)
    for number in range(600):
        if own.random() < 0.02:
            time.sleep(own.random() * 0.003)
        kind = alike.choice(["small", "small", "small", "large", "barrier", "object"])
        if kind == "barrier":
            communicator.barrier()
        elif kind == "object":
            assert communicator.broadcast_object((number, RANK), root=LAST) == (number, LAST)
        else:
            elements = alike.randrange(512) if kind == "small" else 1 << 12
            value = np.full(elements, number + RANK, np.int64)
            communicator.all_reduce(value)
            assert (value == SIZE * number + RANKS.sum()).all()


def test_ranks_may_have_other_strides(communicator):
    mine = np.arange(12.0).reshape(3, 4)
    value = np.asfortranarray(mine) if RANK == 0 else mine.copy()
    communicator.all_reduce(value)
    assert (value == SIZE * mine).all()


def test_a_mismatch_is_told_and_the_next_sum_is_right(communicator):
    def differs():
        communicator.all_reduce(np.ones(3 if RANK == LAST else 2))

    for name, text, _ in errors_of_ranks(differs):
        assert name == CollectiveMismatchError.__name__
        assert "all_reduce(sum, float64, (3,))" in text
        assert "all_reduce(sum, float64, (2,))" in text
        assert "test_small_sums.py:" in text
    value = np.ones(3)
    communicator.all_reduce(value)
    assert value.tolist() == [SIZE] * 3


def test_an_error_of_one_rank_reaches_those_that_wait_in_a_small_sum(communicator):
    def fails():
        if RANK == LAST:
            communicator.raise_together(KeyError("on the last"))
        communicator.all_reduce(np.ones(2))

    for name, text, _ in errors_of_ranks(fails):
        assert name == CollectiveMismatchError.__name__
        assert f"rank {LAST}: raised KeyError: 'on the last'" in text


def test_wrong_operands_are_errors_on_all_ranks(communicator):
    for wrong, text in (
        (lambda: communicator.all_reduce(np.ones(2), "mean"), "op must be one of"),
        (lambda: communicator.all_reduce(np.ones(2, int), Reduction(scale=0.5)), "scale is for"),
        (lambda: communicator.all_reduce(np.ones(2), out=np.ones(3)), "out must be"),
    ):
        for name, message, _ in errors_of_ranks(wrong):
            assert name == ValueError.__name__
            assert text in message


def test_it_is_recorded_as_any_other_call(communicator):
    communicator.all_reduce(np.ones(2, np.float32), reducing("max", "what it is"))
    entry = communicator.contract.watch.record.last(1)[0]
    assert entry.call == "all_reduce(max, float32, (2,), what it is)"
    assert "test_small_sums.py:" in entry.site
    assert entry.number == communicator.contract.calls
    assert entry.waited >= 0


def test_a_forked_child_writes_nothing(communicator):
    """Into the slot that its parent is about to fill."""
    value = np.full(4, RANK + 1)
    pid = os.fork()
    if pid == 0:
        try:
            communicator.all_reduce(np.full(4, 1000))
        except RuntimeError:
            os._exit(0)
        os._exit(1)
    communicator.all_reduce(value)
    assert value.tolist() == [SIZE * (SIZE + 1) // 2] * 4
    assert os.waitpid(pid, 0)[1] == 0


def test_a_stall_is_raised_in_a_small_sum():
    """And the rank does not come back: its slot may be read by the others."""
    communicator = communicator_for(WORLD.Dup())
    if RANK == 0:
        record, board = communicator.contract.watch.record, communicator.contract.watch.slot
        record.words[STALLED] = record.words[board + GROUP]
        record.words[ABORT] = RAISE
        with pytest.raises(StallError):
            communicator.all_reduce(np.ones(2))
        record.words[ABORT] = 0
        with pytest.raises(RuntimeError, match="cannot be called any more"):
            communicator.all_reduce(np.ones(2))
    WORLD.Barrier()


def test_parts_have_slots_of_their_own(through_mpi, communicator):
    part = communicator.split(RANK % 2)
    value = np.full(3, RANK)
    part.all_reduce(value)
    assert value.tolist() == [RANKS[RANK % 2 :: 2].sum()] * 3
    assert through_mpi == []
    communicator.contract.parts.clear()


def test_where_no_memory_may_be_shared_mpi_sums(monkeypatch, through_mpi):
    monkeypatch.setenv("MPISTRAT_SHARED_MB", "0")
    communicator = communicator_for(WORLD.Dup())
    value = np.ones(2)
    communicator.all_reduce(value)
    assert value.tolist() == [SIZE] * 2
    assert len(through_mpi) == 1


def test_an_equal_reduction_is_the_same_object():
    assert reducing("max", "label", 0.5) is reducing("max", "label", 0.5)
    assert Reduction("max", "label", 0.5) == reducing("max", "label", 0.5)
    assert hash(Reduction("max", "label", 0.5)) == hash(reducing("max", "label", 0.5))
    with pytest.raises(AttributeError):
        reducing().op = "max"
