"""Steps on their way to a device."""

import numpy as np
import pytest
import torch

import mpistrat as ms
from mpistrat.input import distributed_dataset
from mpistrat.input.device_copies import DeviceCopies

KIND = getattr(torch.accelerator.current_accelerator(check_available=True), "type", "")
GPU = f"{KIND}:0"


class Logged:
    """In the place of DeviceCopies: notes when copies begin and when they are asked for."""

    needed = True
    fails_at = None

    def __init__(self, log):
        self.log = log

    def start(self, batches):
        if self.fails_at == int(batches[0][0]):
            raise MemoryError("no room on the device")
        self.log.append(("start", int(batches[0][0])))
        return batches

    def arrived(self, batches):
        self.log.append(("arrived", int(batches[0][0])))
        return batches


@pytest.fixture
def log(monkeypatch):
    log = []
    monkeypatch.setattr(distributed_dataset, "DeviceCopies", lambda devices: Logged(log))
    return log


def batches(error_at=None):
    for i in range(4):
        if i == error_at:
            raise OSError("broken")
        yield np.array([i])


class Batches:
    def __init__(self, error_at=None):
        self.error_at = error_at

    def __iter__(self):
        return batches(self.error_at)


def distributed(depth, error_at=None):
    options = ms.InputOptions(experimental_per_replica_buffer_size=depth)
    strategy = ms.OneDeviceStrategy("cpu")
    return strategy.experimental_distribute_dataset(Batches(error_at), options)


@pytest.mark.parametrize("depth", [1, 2])
def test_copies_begin_before_the_step_is_asked_for(log, depth):
    for i, step in enumerate(distributed(depth)):
        assert int(step[0]) == i
        started = [number for what, number in log if what == "start"]
        assert started == list(range(min(i + depth + 1, 4)))
    assert [number for what, number in log if what == "arrived"] == [0, 1, 2, 3]


def test_what_is_on_its_way_is_not_lost_by_a_restart(log):
    first = distributed(2)
    iterator = iter(first)
    next(iterator)
    state = iterator.state_dict()
    assert state["steps"] == 1
    again = distributed(2)
    again.load_state_dict(state)
    assert [int(step[0]) for step in again] == [1, 2, 3]
    assert [int(step[0]) for step in iterator] == [1, 2, 3]


def test_the_end_is_the_end_only_when_it_was_told(log):
    """So that a program which counts epochs counts the same with and without a device."""
    dataset = distributed(2)
    iterator = iter(dataset)
    for _ in range(4):
        next(iterator)
    assert (iterator.state_dict()["epoch"], iterator.state_dict()["steps"]) == (0, 4)
    assert list(iterator) == []
    assert (iterator.state_dict()["epoch"], iterator.state_dict()["steps"]) == (1, 0)


def test_an_error_comes_after_the_steps_before_it(log):
    iterator = iter(distributed(2, error_at=2))
    assert [int(next(iterator)[0]) for _ in range(2)] == [0, 1]
    for _ in range(2):  # what came after it is not given as if nothing had been lost
        with pytest.raises(OSError, match="broken"):
            next(iterator)
    assert iterator.state_dict()["steps"] == 2


def test_a_copy_that_fails_loses_no_step(log, monkeypatch):
    monkeypatch.setattr(Logged, "fails_at", 2)
    iterator = iter(distributed(1))
    assert [int(next(iterator)[0]) for _ in range(2)] == [0, 1]
    with pytest.raises(MemoryError):
        next(iterator)
    state = iterator.state_dict()
    monkeypatch.setattr(Logged, "fails_at", None)
    again = distributed(1)
    again.load_state_dict(state)
    assert [int(step[0]) for step in again] == [2, 3]


def test_arrays_are_copied_from_a_source_that_uses_its_memory_again():
    copies = DeviceCopies((GPU,))
    buffer = np.zeros(3)
    sent = copies.start([buffer])
    buffer[:] = 1
    assert copies.arrived(sent)[0].tolist() == [0, 0, 0]


class Graphs:
    """It moves its tensors itself."""

    device = "host"

    def to(self, device):
        self.device = device
        return self


def test_a_part_that_moves_itself_is_moved_when_it_is_asked_for():
    copies = DeviceCopies((GPU, "cpu:0"))
    graphs = [Graphs(), Graphs()]
    sent = copies.start([(graphs[0], "text", None), (graphs[1], "text", None)])
    assert graphs[0].device == "host"
    assert copies.arrived(sent) == [(graphs[0], "text", None), (graphs[1], "text", None)]
    assert [part.device for part in graphs] == [GPU, "host"]


@pytest.mark.gpu
def test_a_packed_sequence_arrives_on_the_gpu():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2, 1)])
    copies = DeviceCopies((GPU,))
    ((arrived, x),) = copies.arrived(copies.start([(packed, torch.ones(1))]))
    assert (arrived.data.device, x.device) == (torch.device(GPU),) * 2
    assert arrived.batch_sizes.device.type == "cpu"


def test_the_host_copies_nothing():
    assert not DeviceCopies(("cpu:0", "cpu:1")).needed


@pytest.mark.gpu
def test_batches_arrive_on_the_gpu():
    """Through a stream of their own: each is right, although the next is copied while it is used."""
    copies = DeviceCopies((GPU,))
    assert copies.needed
    ways = [copies.start([{"x": torch.full((1 << 20,), float(i))}]) for i in range(8)]
    for i, way in enumerate(ways):
        (batch,) = copies.arrived(way)
        assert batch["x"].device == torch.device(GPU)
        assert float(batch["x"].sum()) == i * float(1 << 20)


@pytest.mark.gpu
def test_the_copy_runs_beside_the_computation():
    """Both in less time than one after the other."""
    strategy = ms.OneDeviceStrategy(GPU)
    x = torch.rand(4096, 4096, device=GPU)
    batch = torch.rand(64 << 20).pin_memory()

    class Source:
        def __iter__(self):
            return iter([batch] * 10)

    def seconds(depth, fetch=True):
        options = ms.InputOptions(
            experimental_per_replica_buffer_size=depth, experimental_fetch_to_device=fetch
        )
        begin, end = (torch.Event(KIND, enable_timing=True) for _ in range(2))
        begin.record()
        for step in strategy.experimental_distribute_dataset(Source(), options):
            step = step if fetch else step.to(GPU)
            for _ in range(4):
                torch.mm(x, x)
        end.record()
        torch.accelerator.synchronize()
        return begin.elapsed_time(end)

    seconds(1)
    one_after_the_other, overlapped = seconds(1, fetch=False), seconds(1)
    assert overlapped < 0.9 * one_after_the_other
