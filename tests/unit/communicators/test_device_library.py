"""Staging of CUDA tensors, on a machine without CUDA: streams are autospecs of torch's own, memory is the host's."""

import contextlib
from unittest import mock

import pytest
import torch

from mpistrat.communicators import reducing
from mpistrat.communicators.collectives.all_reduce import AllReduce
from mpistrat.communicators.local import LocalCommunicator
from mpistrat.communicators.transports.accelerator import buffers as device_buffers
from mpistrat.communicators.transports.accelerator import staging as device_staging
from mpistrat.communicators.transports.accelerator.library import TorchLibrary
from mpistrat.communicators.transports.accelerator.staging import StagedTransport
from mpistrat.liveness.records.watch import CommunicatorWatch

SUM = reducing()
STREAM, EVENT = torch.cuda.Stream, torch.cuda.Event


class Doubling(LocalCommunicator):
    """As a second rank with the same values would; notes what came."""

    def __init__(self):
        self.came = []

    def all_reduce(self, buffer, reduction=SUM, *, out=None, cause=None):
        self.came.append((buffer.dtype, buffer.numel()))
        buffer *= 2 if reduction.scale is None else 2 * reduction.scale


@pytest.fixture
def streams(monkeypatch):
    """What `torch.cuda` gave out; the copies run at once."""
    made = []

    def new_stream(device=None):
        stream = mock.create_autospec(STREAM, instance=True)
        stream.record_event.side_effect = lambda: mock.create_autospec(
            EVENT, instance=True, **{"query.side_effect": [False, True]}
        )
        made.append(stream)
        return stream

    current = new_stream()
    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "Stream", new_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: 3)
    monkeypatch.setattr(device_buffers, "is_on_gpu", lambda buffer: True)
    monkeypatch.setattr(
        device_buffers, "library_of", lambda buffer, index: TorchLibrary("cuda", index)
    )
    monkeypatch.setattr(device_staging, "CHUNK", 64)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
@pytest.mark.parametrize("length", [0, 1, 100])
def test_chunks_of_tensors(streams, dtype, length):
    host = Doubling()
    staged = StagedTransport(host, 3, CommunicatorWatch())
    buffer = torch.arange(length).remainder(2).to(dtype).view(-1, 1)
    expected = (buffer * 2).to(dtype)
    staged.all_reduce(AllReduce(buffer))
    assert torch.equal(buffer, expected)
    assert all(d == dtype and n * dtype.itemsize <= 64 for d, n in host.came)
    assert sum(n for _, n in host.came) == length


def test_copies_wait_for_the_caller_s_stream_and_it_for_them(streams):
    staged = StagedTransport(Doubling(), 3, CommunicatorWatch())
    staged.all_reduce(AllReduce(torch.ones(100)))
    current, down, _ = streams
    assert down.wait_event.call_args_list[0].args[0] is not None
    assert len(down.wait_event.mock_calls) == 1 + (100 * 4 // 64 + 1) - device_staging.BUFFERS
    current.wait_event.assert_called_once()


def test_what_requires_a_gradient(streams):
    staged = StagedTransport(Doubling(), 3, CommunicatorWatch())
    parameter = torch.ones(3, requires_grad=True)
    staged.all_reduce(AllReduce(parameter.detach()))
    assert parameter.tolist() == [2, 2, 2]
