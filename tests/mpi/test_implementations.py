"""`CommunicationOptions(implementation=...)`: equal results by every way, and which way was taken."""

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpistrat as ms
from mpistrat.communicators import reducing
from mpistrat.communicators.construction import communicator_for
from mpistrat.communicators.costs.measurement import Costs
from mpistrat.communicators.node import shared_memory
from mpistrat.communicators.router import Router, Transports
from mpistrat.communicators.transports import pipelined
from mpistrat.communicators.transports.mpi import MpiTransport
from mpistrat.communicators.transports.pipelined import PipelinedTransport
from mpistrat.communicators.transports.ring import RingTransport
from mpistrat.liveness.records.watch import CommunicatorWatch
from support.rank_errors import assert_all_raise, assert_usable, errors_of_ranks

pytestmark = pytest.mark.time_limit(120)

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
WAYS = tuple(ms.CommunicationImplementation)
RING, MPI_WAY = ms.CommunicationImplementation.RING, ms.CommunicationImplementation.MPI

NUMBERS = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
NUMBERS += ["float32", "float64", "complex64", "complex128", "float16"]
DTYPES = [("numpy", name) for name in NUMBERS]
DTYPES += [
    ("torch", n) for n in (*NUMBERS, "bfloat16", "float8_e4m3fn") if n[:4] != "uint" or n == "uint8"
]
# None, fewer than ranks, not a multiple of them, and what goes through shared memory.
SHAPES = [(0,), (), (1,), (2,), (7,), (3, 5), (100_003,)]


@pytest.fixture(scope="module", params=["ring", "in pieces"])
def own_way(request):
    mpi = MpiTransport(WORLD.Dup())
    if request.param == "ring":
        yield Router(Transports(mpi, [RingTransport(mpi)]))
        return
    in_pieces = PipelinedTransport(mpi, CommunicatorWatch())
    in_pieces.costs, in_pieces.smallest = Costs(), 0.0  # always, and in many pieces
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipelined, "SMALLEST", 8)
        patch.setattr(pipelined, "TO_EACH", 1 << 14)
        yield Router(Transports(mpi, [in_pieces]))


def operands(library, dtype, shape):
    """Every rank's; sums are exact in every dtype."""
    length = int(np.prod(shape))
    values = [((np.arange(length) + rank) % 5).reshape(shape) for rank in range(SIZE)]
    if library == "numpy":
        return [np.asarray(v.astype(dtype)) for v in values]
    return [torch.from_numpy(np.asarray(v)).to(getattr(torch, dtype)) for v in values]


def as_numbers(array):
    """Of any dtype, as complex numbers."""
    return np.asarray(
        array.to(torch.complex128) if isinstance(array, torch.Tensor) else array, complex
    )


def copy(array):
    return array.clone() if isinstance(array, torch.Tensor) else array.copy()


@pytest.mark.parametrize(("library", "dtype"), DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_way_of_our_own(own_way, library, dtype, shape):
    everyone = operands(library, dtype, shape)
    mine, total = everyone[RANK], sum(as_numbers(operand) for operand in everyone)
    buffer = copy(mine)
    own_way.all_reduce(buffer)
    assert buffer.dtype == mine.dtype
    assert (as_numbers(buffer) == total).all()
    out = copy(mine)
    half = reducing(scale=0.5 if "float" in dtype or "complex" in dtype else None)
    own_way.all_reduce(mine, half, out=out)
    expected = total * 0.5 if "float" in dtype or "complex" in dtype else total
    assert (as_numbers(out) == expected).all()
    assert (as_numbers(mine) == as_numbers(everyone[RANK])).all()
    if "complex" not in dtype:
        for op in ("max", "min"):
            buffer = copy(mine)
            own_way.all_reduce(buffer, op)
            extreme = getattr(np, op)([as_numbers(operand).real for operand in everyone], axis=0)
            assert (as_numbers(buffer) == extreme).all()
    parts = own_way.all_gather(mine)
    assert [part.shape for part in parts] == [operand.shape for operand in everyone]
    assert all((as_numbers(p) == as_numbers(e)).all() for p, e in zip(parts, everyone, strict=True))


@pytest.mark.parametrize(("library", "dtype"), DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_parts_by_a_way_of_our_own(own_way, library, dtype, rows):
    everyone = operands(library, dtype, (SIZE * rows, 2))
    out = copy(everyone[RANK][:rows])
    own_operand = copy(everyone[RANK])
    own_way.reduce_scatter(own_operand, out)
    total = sum(as_numbers(operand) for operand in everyone)
    assert (as_numbers(out) == total[RANK * rows : (RANK + 1) * rows]).all()
    assert (as_numbers(own_operand) == as_numbers(everyone[RANK])).all()
    whole = copy(everyone[RANK])
    own_way.all_gather_into(everyone[RANK][:rows], whole)
    expected = np.concatenate([as_numbers(operand)[:rows] for operand in everyone])
    assert (as_numbers(whole) == expected).all()
    own_way.all_gather_into(whole[RANK * rows : (RANK + 1) * rows], whole)
    assert (as_numbers(whole) == expected).all()
    own_way.all_to_all(own_operand, whole, [rows] * SIZE, [rows] * SIZE)
    sent_here = [as_numbers(operand)[RANK * rows : (RANK + 1) * rows] for operand in everyone]
    assert (as_numbers(whole) == np.concatenate(sent_here)).all()
    of_another_length = everyone[RANK][: min(RANK, SIZE * rows)]  # on each rank
    parts = own_way.all_gather(of_another_length)
    assert [len(part) for part in parts] == [min(rank, SIZE * rows) for rank in range(SIZE)]


def test_short_floats_are_rounded_once(own_way):
    """After they are scaled: the sum alone would be infinite. And all ranks have the same bits."""
    for buffer in (np.full(10, 60000, np.float16), torch.full((10,), 60000.0).half()):
        own_way.all_reduce(buffer, reducing(scale=1 / SIZE))
        assert (as_numbers(buffer) == float(np.float16(60000))).all()
    values = np.random.default_rng(RANK).standard_normal(1001).astype(np.float32)
    own_way.all_reduce(values)
    assert len(set(WORLD.allgather(values.tobytes()))) == 1


def test_the_programs_floating_point_settings_are_left_alone(own_way):
    buffer = np.full(100, np.finfo(np.float32).max, np.float32)
    with np.errstate(all="raise"):
        own_way.all_reduce(buffer)
    assert np.isinf(buffer).all() or SIZE == 1


@pytest.mark.mpi(min_size=2)
def test_a_sum_in_pieces_that_was_left_is_the_last(monkeypatch):
    """By Ctrl-C, say: what is still on its way must not be taken for a part of the next sum."""
    mpi = MpiTransport(WORLD.Dup())
    in_pieces = PipelinedTransport(mpi, CommunicatorWatch())
    in_pieces.costs, in_pieces.smallest = Costs(), 0.0
    communicator = Router(Transports(mpi, [in_pieces]))

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pipelined, "wait_until", interrupted)
        with pytest.raises(KeyboardInterrupt):
            communicator.all_reduce(np.ones(1 << 16))
    with pytest.raises(RuntimeError, match=r"left a sum in its middle, for KeyboardInterrupt"):
        communicator.all_reduce(np.ones(1 << 16))
    small = np.ones(1, np.float32)
    communicator.all_reduce(small)  # MPI's own messages do not mix with them
    assert small[0] == SIZE
    MPI.Request.Waitall(in_pieces.left)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("elements", [3, 100_003])
def test_of_one_collective(way, elements):
    """Sums, gathers and row-sparse values, whatever the strategy's own way is."""
    strategy = ms.MultiWorkerMirroredStrategy()
    options = ms.CommunicationOptions(implementation=way)

    def replica():
        context = ms.get_replica_context()
        value = torch.arange(elements) + context.replica_id_in_sync_group
        total = context.all_reduce("sum", value, options)
        parts = context.all_gather(value[: 2 + RANK], 0, options)
        rows = ms.IndexedSlices(np.ones((1, 2)), np.array([RANK]), (SIZE, 2))
        sparse = context.all_reduce("sum", rows, options)
        return total, parts, sparse

    total, parts, sparse = strategy.run(replica)
    assert torch.equal(total, torch.arange(elements) * SIZE + sum(range(SIZE)))
    lengths = [min(2 + rank, elements) for rank in range(SIZE)]
    expected = torch.cat([torch.arange(n) + rank for rank, n in enumerate(lengths)])
    assert torch.equal(parts, expected)
    assert sorted(np.asarray(sparse.indices).tolist()) == list(range(SIZE))


def gradients(way, model_seed=0, comm=None):
    strategy = ms.MultiWorkerMirroredStrategy(
        comm=comm,
        communication_options=ms.CommunicationOptions(implementation=way),
        gradients="mean",
    )
    torch.manual_seed(model_seed)
    with strategy.scope():
        model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300))
    examples = torch.randn(4, 300, generator=torch.Generator().manual_seed(RANK))
    for _ in range(3):
        strategy.run(lambda: model(examples).square().sum().backward())
    return strategy, model


def test_of_a_strategy():
    """Gradients and buffers, too; equal but for rounding, and the same bits on all ranks."""
    trained = [gradients(way)[1] for way in WAYS]
    for model in trained[1:]:
        for parameter, other in zip(model.parameters(), trained[0].parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model[1].running_mean, trained[0][1].running_mean)
    for model in trained:
        bits = model[0].weight.grad.numpy().tobytes()
        assert len(set(WORLD.allgather(bits))) == 1


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", [RING, MPI_WAY])
def test_what_is_not_used_is_not_allocated(way):
    """No window for gradients, nothing measured, where the way was given."""
    comm = WORLD.Dup()
    communicator_for(comm)  # any has slots for small sums
    before = shared_memory.own_bytes()
    strategy, _ = gradients(way, comm=comm)
    shared = strategy.extended.communicator
    assert shared_memory.own_bytes() == before
    assert shared.memory.window_capacity == 0
    assert shared.memory.window_buffer(1 << 20) is None
    explained = strategy.extended.explain()
    assert f"implementation={way.name} was asked for" in explained
    assert "shared memory" not in explained
    assert ("in a ring" in explained) == (way is RING)


@pytest.mark.mpi(min_size=2)
def test_calls_are_those_of_one_communicator():
    """Whatever ways they take: they are counted and compared together."""
    checked = communicator_for(WORLD)
    ring = checked.by(RING)
    assert checked.by(RING) is ring
    assert ring.by(ms.CommunicationImplementation.AUTO) is ring
    assert ring.by(MPI_WAY) is checked.by(MPI_WAY)
    calls = checked.contract.calls
    ring.barrier()
    buffer = np.ones(3)
    checked.by(MPI_WAY).all_reduce(buffer)
    assert (buffer == SIZE).all()
    assert checked.contract.calls == calls + 2
    part = ring.split(0, key=-RANK)
    assert part.rank == SIZE - 1 - RANK
    buffer = np.ones(3)
    part.all_reduce(buffer)
    assert (buffer == SIZE).all()
    assert "in a ring" in part.explain()


@pytest.mark.mpi(min_size=2)
def test_ranks_that_ask_for_different_ways():
    way = RING if RANK == 0 else MPI_WAY
    strategy = ms.MultiWorkerMirroredStrategy()
    options = ms.CommunicationOptions(implementation=way)

    def replica():
        ms.get_replica_context().all_reduce("sum", np.ones(3), options)

    errors = errors_of_ranks(lambda: strategy.run(replica))
    assert {name for name, _, _ in errors} == {"CollectiveMismatchError"}
    assert all("by RING" in message and "by MPI" in message for _, message, _ in errors)


@pytest.mark.mpi(min_size=2)
def test_an_error_of_one_rank():
    """Those that wait in a ring learn of it, as in any other way."""
    strategy = ms.MultiWorkerMirroredStrategy()
    options = ms.CommunicationOptions(implementation=RING)

    def replica():
        value = np.ones(3) if RANK else "no number"
        ms.get_replica_context().all_reduce("sum", value, options)

    assert_all_raise("TypeError", 0, lambda: strategy.run(replica))
    assert_usable(strategy)
