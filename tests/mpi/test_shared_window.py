"""Collectives through memory that the ranks of a node share: results as over MPI, and nobody's memory is spoilt."""

import gc
import math
import os
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpistrat as ms
from mpistrat.communicators import reducing
from mpistrat.communicators.collectives.all_reduce import AllReduce
from mpistrat.communicators.construction import communicator_for
from mpistrat.communicators.node import shared_memory
from mpistrat.communicators.node.blocks import Blocks
from mpistrat.communicators.node.window import Window
from mpistrat.communicators.router import Router, Transports
from mpistrat.communicators.transports.mpi import MpiTransport
from mpistrat.communicators.transports.window import WindowTransport
from mpistrat.liveness.records.record import RankRecord
from support.chosen_transport import chosen_transport

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.time_limit(120)]

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size

NUMBERS = ("int8", "uint8", "int32", "int64", "float32", "float64", "float16", "complex64")
SHORT = ("bfloat16", "float8_e4m3fn")
DTYPES = [("numpy", name) for name in NUMBERS] + [("torch", n) for n in (*NUMBERS, *SHORT)]
# Elements: a cache line and some, more than a block of all ranks, and neither a multiple of anything.
LENGTHS = (40_000, 1_000_003)


@pytest.fixture(scope="module")
def window():
    """That of the world, which takes everything that is large."""
    checked = communicator_for(WORLD)
    shared = checked.transports.preferred[0]
    assert isinstance(shared, WindowTransport)
    checked.all_reduce(np.zeros(1 << 18))  # measures, once
    assert not shared.why_not
    measured = shared.borders
    shared.borders = [0]
    yield checked
    shared.borders = measured


def of_its_own(limit=math.inf):
    """Such a communicator, unchecked, whose ranks have nothing in common yet; and what it takes large buffers by."""
    mpi = MpiTransport(WORLD.Dup())
    shared = WindowTransport(mpi, communicator_for(WORLD).contract.watch, limit)
    return Router(Transports(mpi, [shared], shared)), shared


def operands(library, dtype, length):
    """Of every rank; sums are exact in every dtype."""
    values = [np.arange(length) % 7 + rank for rank in range(SIZE)]
    if library == "numpy":
        return [v.astype(dtype) for v in values]
    return [torch.from_numpy(v).to(getattr(torch, dtype)) for v in values]


def equal(array, expected):
    if isinstance(array, torch.Tensor) and array.dtype.itemsize == 1 and array.is_floating_point():
        array, expected = array.float(), expected.to(array.dtype).float()
    return bool((array == expected).all())


def added(operands):
    if isinstance(operands[0], torch.Tensor) and operands[0].dtype == torch.float8_e4m3fn:
        return sum(operand.float() for operand in operands)  # which torch does not add
    return sum(operands[1:], start=operands[0])


def copy(array):
    return array.clone() if isinstance(array, torch.Tensor) else array.copy()


@pytest.mark.parametrize(("library", "dtype"), DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_collective(window, library, dtype, length):
    everyone = operands(library, dtype, length)
    mine, total = everyone[RANK], added(everyone)
    last = SIZE - 1

    buffer = copy(mine)
    window.all_reduce(buffer)
    assert equal(buffer, total)
    out = copy(mine)
    window.all_reduce(mine, out=out)
    assert equal(out, total)
    assert equal(mine, everyone[RANK])
    if not dtype.startswith("complex"):
        buffer = copy(mine)
        window.all_reduce(buffer, "max")
        assert equal(buffer, everyone[-1])
        window.all_reduce(buffer, "min")
        assert equal(buffer, everyone[-1])
    buffer = copy(mine)
    window.reduce(buffer, last)
    assert equal(buffer, total if last == RANK else mine)
    buffer = copy(mine)
    window.broadcast(buffer, last)
    assert equal(buffer, everyone[last])
    parts = window.all_gather(mine[: length - RANK])  # one element fewer on each rank
    assert all(equal(parts[r], everyone[r][: length - r]) for r in range(SIZE))
    each = length // SIZE
    out = copy(mine[:each])
    window.reduce_scatter(copy(mine[: each * SIZE]), out)
    assert equal(out, total[RANK * each : (RANK + 1) * each])
    whole = copy(mine[: each * SIZE])
    window.all_gather_into(mine[:each], whole)
    rows = whole.reshape(SIZE, each)
    assert all(equal(rows[r], everyone[r][:each]) for r in range(SIZE))
    window.all_gather_into(rows[RANK], whole)  # which is there already
    assert all(equal(rows[r], everyone[r][:each]) for r in range(SIZE))
    less = each // 3  # rank r sends rank s each - (r + s) % 3 * less
    sent = [each - (RANK + r) % 3 * less for r in range(SIZE)]
    out = copy(mine[: sum(sent)])
    window.all_to_all(copy(mine[: sum(sent)]), out, sent, sent)
    starts = [
        [sum(each - (r + s) % 3 * less for s in range(n)) for n in range(SIZE)] for r in range(SIZE)
    ]
    arrived = np.cumsum([0, *sent])
    for r in range(SIZE):
        first = starts[r][RANK]
        assert equal(out[arrived[r] : arrived[r + 1]], everyone[r][first : first + sent[r]])
    if "float" in dtype:
        buffer = copy(mine)
        window.all_reduce(buffer, reducing(scale=0.5))
        assert equal(buffer, total * 0.5)


def in_window(window, array):
    """A copy of `array` in the window."""
    memory = window.memory.window_buffer(array.nbytes)
    assert memory is not None
    if isinstance(array, torch.Tensor):
        buffer = torch.from_numpy(memory).view(array.dtype)
        return buffer.copy_(array)
    buffer = memory.view(array.dtype)
    buffer[:] = array
    return buffer


@pytest.mark.parametrize(("library", "dtype"), DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_what_lies_in_the_window(window, library, dtype, length):
    everyone = operands(library, dtype, length)
    buffer = in_window(window, everyone[RANK])
    window.all_reduce(buffer)
    assert equal(buffer, added(everyone))
    if "float" in dtype:
        buffer = in_window(window, everyone[RANK])
        window.all_reduce(buffer, reducing(scale=0.5))
        assert equal(buffer, added(everyone) * 0.5)


def test_a_buffer_that_lies_elsewhere_on_one_rank(window):
    """Or at another place of the window: the ranks tell each other."""
    everyone = operands("numpy", "float32", 100_000)
    total = sum(everyone)
    first = in_window(window, everyone[RANK])
    second = in_window(window, everyone[RANK])
    for buffer in (
        first if RANK else second,
        everyone[RANK].copy() if RANK else first,
        second[5:-7] if RANK else second[3:-9],
    ):
        buffer[:] = everyone[RANK][: len(buffer)]
        window.all_reduce(buffer)
        assert equal(buffer, total[: len(buffer)])


def test_memory_is_used_again_once_nothing_refers_to_it(window):
    def address(buffer):
        return buffer.ctypes.data

    first = window.memory.window_buffer(1 << 20)
    mapped = mappings()
    tensor = torch.from_numpy(first).view(torch.float32)[5:10]
    where = address(first)
    del first
    others = [window.memory.window_buffer(1 << 20) for _ in range(3)]
    assert all(block is None or address(block) != where for block in others)
    del tensor
    assert address(window.memory.window_buffer(1 << 20)) == where
    assert mappings() == mapped


def mappings():
    return Path("/proc/self/maps").read_text().count("memfd:mpistrat")


def test_a_smaller_window_is_given_back(window):
    window.memory.window_buffer(1 << 20)
    before = mappings(), len(os.listdir("/proc/self/fd"))
    window.memory.window_buffer(
        window.memory.window_capacity + 1
    )  # all ranks map a larger one in its place
    assert (mappings(), len(os.listdir("/proc/self/fd"))) == before


@pytest.mark.parametrize("in_the_window", [False, True])
def test_the_programs_floating_point_settings_are_its_own(window, in_the_window):
    """They would let the rank raise whose slice overflows, while the others wait."""
    operand = np.full(200_000, np.finfo(np.float32).max, np.float32)
    buffer = in_window(window, operand) if in_the_window else operand
    with np.errstate(all="raise"):
        window.all_reduce(buffer)
        window.all_reduce(buffer, reducing(scale=2.0))
    assert np.isinf(buffer).all()


def test_what_is_no_operand(window):
    """An error on all ranks, whatever the size."""
    for elements in (8, 200):
        square = np.ones((elements, elements), np.float32)
        for wrong in (
            lambda square=square: window.all_reduce(square, out=np.empty(square.shape)),
            lambda square=square: window.all_reduce(square, out=np.empty(3, np.float32)),
            lambda square=square: window.all_reduce(square.astype(np.int64), reducing(scale=0.5)),
        ):
            with pytest.raises(
                ValueError, match=r"out must be float32|scale is for floating point"
            ):
                wrong()
    with pytest.raises(ValueError, match="expected a C-contiguous buffer"):
        window.all_reduce(np.asfortranarray(square))
    with pytest.raises(ValueError, match="expected a C-contiguous buffer"):
        window.all_reduce(square, out=np.asfortranarray(square))
    with pytest.raises(Exception, match=r"[Bb]yte order|[Ii]nvalid|dtype"):
        window.all_reduce(np.ones((500, 500), ">f4"))
    again = np.ones(100_000, np.float32)
    window.all_reduce(again)
    assert equal(again, SIZE)


def test_below_what_was_measured_mpi_is_used(window, monkeypatch):
    """Also once there is a window."""
    window.memory.window_buffer(1 << 20)
    taken = []
    through_mpi = window.mpi.all_reduce
    seen = {AllReduce: lambda _, call: (taken.append(1), through_mpi(call))}
    monkeypatch.setattr(window.mpi, "moves", {**window.mpi.moves, **seen})
    monkeypatch.setattr(window.transports.preferred[0], "borders", [1 << 22])
    buffer = np.full(100_000, RANK, np.float32)
    window.all_reduce(buffer)
    assert taken
    assert equal(buffer, sum(range(SIZE)))


def test_what_is_left_in_its_middle_is_not_followed_by_another(monkeypatch):
    """Results would be wrong from then on."""
    communicator, shared = of_its_own()
    buffer = np.ones(1 << 18)
    communicator.all_reduce(buffer)
    shared.borders = [0]
    tick = Blocks.tick

    def interrupted(*args):
        tick(*args)
        raise TimeoutError("the alarm")

    with monkeypatch.context() as patch:
        patch.setattr(Blocks, "tick", interrupted)
        with pytest.raises(TimeoutError):
            communicator.all_reduce(buffer)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="left a collective in its middle, for TimeoutError"):
            communicator.all_reduce(buffer)
    shared.mpi.comm.Free()


def test_parts_of_a_communicator_share_memory(window):
    """Each part with its own ranks."""
    part = window.split(RANK % 2)
    if part.size > 1:
        assert isinstance(part.transports.preferred[0], WindowTransport)
    buffer = np.full(1 << 18, RANK)
    part.all_reduce(buffer)
    assert equal(buffer, sum(range(RANK % 2, SIZE, 2)))


def test_nobody_leaves_while_others_read(window):
    """A rank that overwrites its buffer at once spoils nothing, however slow another is."""
    everyone = operands("numpy", "float32", 300_000)
    total = sum(everyone)
    for turn in range(3 * SIZE):
        buffer = in_window(window, everyone[RANK])
        private = everyone[RANK].copy()
        if turn % SIZE == RANK:
            time.sleep(0.02)
        window.all_reduce(buffer)
        result = buffer.copy()
        buffer[:] = -1
        assert equal(result, total)
        window.all_reduce(private)
        result = private.copy()
        private[:] = -1
        assert equal(result, total)


@pytest.mark.parametrize("what", ["memfd_create", "open", "posix_fallocate"])
def test_without_shared_memory_everything_goes_through_mpi(monkeypatch, what):
    """One rank cannot make it, or map the others': all do without, and rank 0 says why."""

    def fails(*args, **kwargs):
        raise OSError(28, "No space left on device")

    if RANK == SIZE - 1:
        monkeypatch.setattr(shared_memory.os, what, fails)
    communicator, shared = of_its_own()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        buffer = np.full(1 << 17, RANK + 1.0)
        communicator.all_reduce(buffer)
        assert communicator.memory.window_buffer(1 << 20) is None
        communicator.broadcast(buffer)
    assert buffer[0] == SIZE * (SIZE + 1) / 2
    assert f"rank {SIZE - 1} could not" in shared.why_not
    assert "No space left" in shared.why_not
    messages = [
        str(warning.message) for warning in caught if "no shared memory" in str(warning.message)
    ]
    assert len(messages) == (RANK == 0)
    shared.mpi.comm.Free()


def test_a_python_without_memfd_create(monkeypatch):
    """conda's; the C library has it."""
    monkeypatch.delattr(os, "memfd_create")
    communicator, shared = of_its_own()
    assert communicator.memory.window_buffer(1 << 20) is not None
    assert not shared.why_not
    shared.mpi.comm.Free()


def test_memory_can_be_bounded():
    """In all, by the rank that allows least."""
    gc.collect()  # what tests before have left may go at any time, and is counted until then
    limit = shared_memory.own_bytes() + (10e6 if RANK == SIZE - 1 else 1e9)
    communicator, shared = of_its_own(limit)
    assert communicator.memory.window_buffer(4 << 20) is None
    buffer = communicator.memory.window_buffer(1 << 20)
    assert buffer is not None
    assert communicator.memory.window_buffer(4 << 20) is None
    explained = communicator.explain()
    assert "3.1 MB for blocks in flight" in explained
    assert "window: up to 3.1 MB" in explained
    another, second = of_its_own(limit)  # of what is left
    assert another.memory.window_buffer(1 << 20) is None
    none, third = of_its_own(0)
    buffer = np.full(1 << 17, RANK)
    none.all_reduce(buffer)
    assert buffer[0] == sum(range(SIZE))
    assert "MPISTRAT_SHARED_MB allows no 3.1 MB more" in none.explain()
    assert "through MPI" in none.explain()
    for window_communicator in (shared, second, third):
        window_communicator.mpi.comm.Free()


@pytest.fixture
def limit():
    """Of a process that may share a window of 1 MB, or one of 2 MB, but not both."""
    return shared_memory.own_bytes() + Blocks.NBYTES + Window.nbytes_for(2 << 20)


@pytest.fixture
def bounded(limit):
    """A communicator with this limit."""
    communicator, shared = of_its_own(limit)
    yield communicator
    shared.mpi.comm.Free()


def test_a_larger_window_may_take_the_place_of_one_that_nobody_uses(bounded, limit):
    first = bounded.memory.window_buffer(1 << 20)
    if RANK < SIZE - 1:
        del first
    assert bounded.memory.window_buffer(2 << 20) is None  # the last rank uses the other one
    assert bounded.memory.window_capacity == 1 << 20
    buffer = bounded.memory.window_buffer(1 << 20).view(np.float32)
    buffer[:] = RANK
    bounded.all_reduce(buffer)
    assert equal(buffer, sum(range(SIZE)))
    first = buffer = None
    assert bounded.memory.window_buffer(2 << 20) is not None
    assert shared_memory.own_bytes() <= limit
    assert bounded.memory.window_capacity == 2 << 20


def test_a_larger_window_that_cannot_be_had_leaves_the_one_there_is(bounded, monkeypatch):
    def fails(*args):
        raise OSError(28, "No space left on device")

    address = bounded.memory.window_buffer(1 << 20).ctypes.data
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if RANK == SIZE - 1:
            patch.setattr(shared_memory.os, "memfd_create", fails)
        assert bounded.memory.window_buffer(2 << 20) is None
    assert bounded.memory.window_buffer(1 << 20).ctypes.data == address


def test_memory_is_given_back():
    before = shared_memory.own_bytes()
    communicator, shared = of_its_own()
    comm = shared.mpi.comm
    buffer = communicator.memory.window_buffer(1 << 20)
    assert shared_memory.own_bytes() > before + (3 << 20)
    del communicator, shared
    assert shared_memory.own_bytes() > before  # the buffer's
    del buffer
    assert shared_memory.own_bytes() == before
    comm.Free()


def test_more_communicators_than_a_record_has_room_for(monkeypatch):
    """They go through MPI, unobserved."""
    record, new_slot = communicator_for(WORLD).contract.watch.record, RankRecord.new_slot

    def full(self, *args):
        return None if self is record else new_slot(self, *args)

    monkeypatch.setattr(RankRecord, "new_slot", full)
    comm = WORLD.Dup()
    checked = communicator_for(comm)
    buffer = np.full(1 << 17, RANK)
    assert chosen_transport(checked, buffer) is checked.mpi
    checked.all_reduce(buffer)
    assert equal(buffer, sum(range(SIZE)))


@pytest.mark.parametrize("elements", [10, 100_000])
def test_short_floats_are_rounded_once(window, elements):
    """After they are scaled: the sum alone would be infinite."""
    for buffer in (np.full(elements, 60000, np.float16), torch.full((elements,), 60000.0).half()):
        window.all_reduce(buffer, reducing(scale=1 / SIZE))
        assert equal(buffer, np.float16(60000) if isinstance(buffer, np.ndarray) else 60000)


def test_what_a_strategy_tells(window):
    explained = ms.MultiWorkerMirroredStrategy().extended.explain()
    assert f"{SIZE} ranks of a node, through shared memory" in explained


def trained(strategy, steps, accumulate, clip):
    """Parameters after `steps`, and whether gradients lay in the window."""
    torch.manual_seed(0)
    with strategy.scope():
        model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(RANK)

    def step():
        if not accumulate:
            optimizer.zero_grad()
        model(torch.randn(4, 300, generator=generator)).square().mean().backward()
        if clip:
            time.sleep(0.01 * (RANK == 0))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()

    for _ in range(steps):
        strategy.run(step)
    gradient = model[0].weight.grad.numpy()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [p.detach().clone() for p in model.parameters()], any(
        int(line.split("-")[0], 16) <= gradient.ctypes.data < int(line.split()[0].split("-")[1], 16)
        for line in maps
        if "memfd:mpistrat" in line
    )


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_gradients_lie_in_the_window(monkeypatch, accumulate, clip):
    """And training is what it is without: also when gradients of several backwards are alive, or are changed."""
    strategy = ms.MultiWorkerMirroredStrategy(gradients="mean")
    through_window, lay_there = trained(strategy, 6, accumulate, clip)
    assert lay_there
    monkeypatch.setattr(WindowTransport, "window_buffer", lambda self, nbytes: None)
    monkeypatch.setattr(
        strategy.extended.communicator.transports.preferred[0], "borders", [1 << 40]
    )
    through_mpi, lay_there = trained(strategy, 6, accumulate, clip)
    assert not lay_there
    for in_window_gradient, other in zip(through_window, through_mpi, strict=True):
        torch.testing.assert_close(in_window_gradient, other, rtol=1e-5, atol=1e-7)
    for parameter in through_window:  # the same bits on all ranks
        assert len(set(WORLD.allgather(parameter.numpy().tobytes()))) == 1
