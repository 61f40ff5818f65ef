"""Calls inside backward() where the ranks have no core to spare."""

import os
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mpistrat.torch_distributed import after_backward
from mpistrat.torch_distributed.process_group import MpistratProcessGroup

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.usefixtures("default_group", "busy_cores")]


@pytest.fixture(scope="module")
def busy_cores() -> Iterator[None]:
    """torch's threads take all cores, however many there are."""
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def callers(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads that sum, in the order of their sums."""
    callers: list[threading.Thread] = []
    communicator = cast("MpistratProcessGroup", dist.group.WORLD).communicator
    all_reduce = communicator.all_reduce

    def recorded(*operands: Any) -> None:
        callers.append(threading.current_thread())
        all_reduce(*operands)

    monkeypatch.setattr(communicator, "all_reduce", recorded)
    return callers


def a_gradient(hook: Any) -> torch.Tensor:
    """The gradient of 2 x at ones, after `hook` has changed it."""
    x = torch.ones(3, requires_grad=True)
    x.register_hook(hook)
    (2 * x).sum().backward()
    assert x.grad is not None
    return x.grad


def test_buckets_are_summed_by_the_thread_of_backward(callers: list[threading.Thread]) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    module = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(4)))
    wrapped = DistributedDataParallel(module, bucket_cap_mb=0.01)
    for _ in range(2):
        callers.clear()
        module.zero_grad()
        (wrapped(torch.ones(1, 64)).sum() * (rank + 1)).backward()
        gradient = module[-1].weight.grad
        inputs = module[:-1](torch.ones(1, 64)).detach()
        torch.testing.assert_close(gradient, (size + 1) / 2 * inputs.expand(64, 64))
    assert len(callers) > 1
    assert set(callers) == {threading.main_thread()}


def test_who_waits_inside_backward_makes_the_calls(callers: list[threading.Thread]) -> None:
    size = dist.get_world_size()

    def summed_twice(gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone()
        work = dist.all_reduce(total, async_op=True)
        assert work is not None
        work.wait()
        dist.all_reduce(total)
        return total

    assert a_gradient(summed_twice).tolist() == [2.0 * size**2] * 3
    assert callers == [threading.main_thread()] * 2


def test_a_call_that_is_not_waited_for_comes_before_the_next(
    callers: list[threading.Thread],
) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    total, largest = torch.ones(1), torch.tensor([float(rank)])

    def started(gradient: torch.Tensor) -> None:
        dist.all_reduce(total, async_op=True)
        dist.all_reduce(largest, dist.ReduceOp.MAX)

    a_gradient(started)
    assert (total.item(), largest.item()) == (size, size - 1)
    assert callers == [threading.main_thread()] * 2


def test_a_call_before_backward_comes_first(callers: list[threading.Thread]) -> None:
    size = dist.get_world_size()
    total, other = torch.ones(1), torch.ones(1 << 20)
    for _ in range(3):
        before = dist.all_reduce(other, dist.ReduceOp.MAX, async_op=True)
        a_gradient(lambda gradient: dist.all_reduce(total, async_op=True) and None)
        assert before is not None
        assert before.is_completed()
    assert total.item() == size**3
    assert [thread is threading.main_thread() for thread in callers] == [False, True] * 3


def test_a_callback_calls_at_once(callers: list[threading.Thread]) -> None:
    size = dist.get_world_size()
    total = torch.ones(1)

    def started(gradient: torch.Tensor) -> None:
        def again(_: torch.futures.Future[Any]) -> None:
            work = dist.all_reduce(total, async_op=True)
            assert work is not None
            work.get_future().wait()
            dist.all_reduce(total)

        work = dist.all_reduce(total, async_op=True)
        assert work is not None
        work.get_future().then(again)

    a_gradient(started)
    assert total.item() == size**3
    assert callers == [threading.main_thread()] * 3


def test_a_future_that_backward_waits_for(
    callers: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The communication thread completes it; from then on, no call of the group waits."""
    monkeypatch.setattr(after_backward, "PATIENCE", 0.1)
    size = dist.get_world_size()

    def summed(gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone()
        work = dist.all_reduce(total, async_op=True)
        assert work is not None
        work.get_future().wait()
        return total

    assert a_gradient(summed).tolist() == [2.0 * size] * 3
    monkeypatch.setattr(after_backward, "PATIENCE", 3600.0)
    assert a_gradient(summed).tolist() == [2.0 * size] * 3
    assert [thread.name for thread in callers] == ["mpistrat communication"] * 2
