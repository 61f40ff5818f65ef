"""Calls inside backward() where the ranks have no core to spare."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from mpistrat.liveness import deadlines
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
    monkeypatch.setattr(deadlines, "COMMUNICATION_THREAD_WAITS_FOR_BACKWARD", 0.1)
    size = dist.get_world_size()

    def summed(gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone()
        work = dist.all_reduce(total, async_op=True)
        assert work is not None
        work.get_future().wait()
        return total

    assert a_gradient(summed).tolist() == [2.0 * size] * 3
    monkeypatch.setattr(deadlines, "COMMUNICATION_THREAD_WAITS_FOR_BACKWARD", 3600.0)
    assert a_gradient(summed).tolist() == [2.0 * size] * 3
    assert [thread.name for thread in callers] == ["mpistrat communication"] * 2


Hook = tuple[Any, Any]  # the state and the function of a communication hook of DDP


def powersgd(group: Any) -> Hook:
    return PowerSGDState(group, 1, start_powerSGD_iter=2, min_compression_rate=0.5), powerSGD_hook


def scaled_by_the_largest(group: Any) -> Hook:
    def hook(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        def scaled(done: torch.futures.Future[Any]) -> torch.Tensor:
            (total,) = done.value()
            largest = total.abs().max() * (dist.get_rank() + 1)
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
            return total / largest

        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        assert work is not None
        return work.get_future().then(scaled)

    return None, hook


@pytest.mark.parametrize("make_hook", [powersgd, scaled_by_the_largest])
def test_calls_in_callbacks_are_in_one_order(
    make_hook: Callable[[Any], Hook], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether no rank, each rank or one rank has a core to spare; or one rank's backward() is slow in one step."""
    last = dist.get_rank() == dist.get_world_size() - 1

    def trained(free: bool, slow: bool = False) -> list[torch.Tensor]:
        monkeypatch.setattr(torch, "get_num_threads", lambda: -1 if free else 1_000_000)
        group: Any = dist.new_group()
        torch.manual_seed(0)
        module = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
        wrapped = DistributedDataParallel(module, bucket_cap_mb=0.001, process_group=group)
        wrapped.register_comm_hook(*make_hook(group))
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        for step in range(4):
            optimizer.zero_grad()
            outputs = wrapped(torch.ones(2, 16) + dist.get_rank())
            if slow and last and step == 2:
                module[1].weight.register_hook(lambda _: time.sleep(0.1))
            outputs.square().mean().backward()
            optimizer.step()
        dist.destroy_process_group(group)
        return [parameter.detach() for parameter in module.parameters()]

    monkeypatch.setattr(deadlines, "COMMUNICATION_THREAD_WAITS_FOR_BACKWARD", 0.05)
    without = trained(False)
    for free, slow in ((True, False), (last, False), (False, True)):
        torch.testing.assert_close(trained(free, slow), without, rtol=0, atol=0)
