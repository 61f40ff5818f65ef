"""Optimizer steps of parameters on servers, by the gradients of all workers."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mpistrat as ms
from support.parameter_servers.remote_training import (
    COMM_OF_WORKERS,
    MAKERS,
    WORKERS,
    batch,
    loss_of,
    net,
    one_weight,
    train,
)

pytestmark = pytest.mark.mpi(min_size=2)


def expected(make: Callable[[Any], torch.optim.Optimizer], steps: int) -> torch.nn.Module:
    """One process that steps by the sum of the gradients of all workers' batches."""
    model = net()
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    for step in range(steps):
        optimizer.zero_grad()
        sum(loss_of(model, batch(worker, step)) for worker in range(WORKERS)).backward()  # type: ignore[union-attr]
        optimizer.step()
        scheduler.step()
    return model


def constant_rate(steps: int) -> torch.nn.Module:
    model = net()
    optimizer = MAKERS["adam"](model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        for worker in range(WORKERS):
            loss_of(model, batch(worker, step)).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_synchronous_steps(name: str, split: bool) -> None:
    """Equal to one process; worker 0's values are everybody's; learning rates change."""

    def body(strategy: Any, worker: int) -> None:
        with strategy.scope():
            model = net(seed=worker)
            optimizer = MAKERS[name](model.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()

        for number in range(4):
            strategy.run(step, args=(batch(worker, number),))
            scheduler.step()
        strategy.run(lambda: None)  # pulls
        for got, wanted in zip(
            model.parameters(), expected(MAKERS[name], 4).parameters(), strict=True
        ):
            torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-6)
        assert not optimizer.state

    partitioner = ms.experimental.partitioners.FixedShardsPartitioner(2) if split else None
    train(body, max_staleness=0, gradients="sum", variable_partitioner=partitioner)


def test_several_replicas_of_a_worker() -> None:
    """They aggregate among themselves first, and send once."""

    def body(strategy: Any, worker: int) -> None:
        with strategy.scope():
            model = net(seed=worker)
            optimizer = MAKERS["adam"](model.parameters())
        pushed: list[int] = []

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            replica = ms.get_replica_context().replica_id_in_sync_group
            loss_of(model, x[2 * replica : 2 * replica + 2]).backward()
            optimizer.step()

        client = strategy.extended.job.client
        for number in range(3):
            before = client.bytes_pushed
            strategy.run(step, args=(batch(worker, number),))
            pushed.append(client.bytes_pushed - before)
        strategy.run(lambda: None)
        assert pushed == [4 * sum(p.numel() for p in model.parameters())] * 3
        for got, wanted in zip(model.parameters(), constant_rate(3).parameters(), strict=True):
            torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-6)

    train(body, max_staleness=0, devices=["cpu:0", "cpu:1"], gradients="sum")


def test_asynchronous_steps() -> None:
    """Every gradient is applied once, in whatever order."""

    def body(strategy: Any, worker: int) -> None:
        with strategy.scope():
            model = torch.nn.Linear(4, 1, bias=False)
            torch.nn.init.zeros_(model.weight)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(4)).sum().backward()
            optimizer.step()

        for _ in range(7):
            strategy.run(step)
        COMM_OF_WORKERS.Barrier()
        assert (model.state_dict()["weight"] == -7 * WORKERS).all()

    train(body)


def test_a_round_has_the_numbers_of_the_lowest_rank() -> None:
    """Whoever comes first."""

    def body(strategy: Any, worker: int) -> None:
        with strategy.scope():
            model = torch.nn.Linear(1, 1, bias=False)
            torch.nn.init.zeros_(model.weight)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0 + worker)

        def step() -> None:
            if worker == 0:
                time.sleep(0.2)
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()

        strategy.run(step)
        strategy.run(lambda: None)
        assert model.weight.item() == -WORKERS

    train(body, max_staleness=0, gradients="sum")


def test_the_last_step_is_in_what_is_read_after_it() -> None:
    """Whoever is last, and wherever the weight is read."""

    def body(strategy: Any, worker: int) -> None:
        model, _, step = one_weight(strategy)
        for number in range(1, 4):
            if worker == number % WORKERS:
                time.sleep(0.1)
            strategy.run(step)
            seen = model.state_dict()["weight"].item()
            COMM_OF_WORKERS.Barrier()  # or another may be in the next step
            assert seen == -WORKERS * number

    train(body, max_staleness=0, gradients="sum")


def test_workers_with_different_numbers_of_steps() -> None:
    """Also of steps in which one of them runs something else, alone."""

    def body(strategy: Any, worker: int) -> None:
        model, _, step = one_weight(strategy)
        for _ in range(2 + worker):
            strategy.run(step)
        if worker == WORKERS - 1:
            strategy.run(lambda: None)
            steps = sum(2 + index for index in range(WORKERS))
            assert model.state_dict()["weight"].item() == -steps

    train(body, max_staleness=0, gradients="sum")


def test_all_workers_hear_that_a_step_could_not_be_made() -> None:
    def body(strategy: Any, worker: int) -> None:
        model, optimizer, step = one_weight(strategy)
        strategy.run(step)
        optimizer.param_groups[0]["lr"] = None
        with pytest.raises(TypeError, match=r"the step of .*weight.* by all workers' gradients"):
            strategy.run(step)
        optimizer.param_groups[0]["lr"] = 1.0
        strategy.run(step)
        assert model.state_dict()["weight"].item() == -2 * WORKERS

    train(body, max_staleness=0, gradients="sum")


def test_a_run_that_failed_is_tried_again() -> None:
    """Its gradients are dropped."""

    def body(strategy: Any, worker: int) -> None:
        model, _, step = one_weight(strategy)

        def fail() -> None:
            step()
            if worker == 0:
                raise ValueError("once")

        if worker == 0:
            with pytest.raises(ValueError, match="once"):
                strategy.run(fail)
        strategy.run(step)
        assert model.state_dict()["weight"].item() == -WORKERS
        assert strategy.steps["worker 0 (rank 0)"] == 1

    train(body, max_staleness=0, gradients="sum")


def test_the_mean_is_over_all_workers() -> None:
    """Whether or not they use a parameter, as with MultiWorkerMirroredStrategy."""

    def body(strategy: Any, worker: int) -> None:
        model, _, step = one_weight(strategy)
        strategy.run(step if worker == 0 else lambda: None)
        strategy.run(lambda: None)
        assert model.weight.item() == pytest.approx(-1 / WORKERS)

    train(body, max_staleness=0, gradients="mean")


def test_whether_workers_gradients_are_summed_or_averaged_must_be_said() -> None:
    """As with replicas; a loss that is averaged over all workers' examples says it."""

    def body(strategy: Any, worker: int) -> None:
        model, optimizer, step = one_weight(strategy)
        if WORKERS > 1:
            with pytest.raises(RuntimeError, match=r'.*"sum" or gradients="mean"') as caught:
                strategy.run(step)
            assert f"step() over {WORKERS} workers" in str(caught.value)

        def averaged() -> None:
            optimizer.zero_grad()
            ms.compute_average_loss(model(torch.ones(2, 1)).sum(1)).backward()
            optimizer.step()

        strategy.run(averaged)
        seen = model.state_dict()["weight"].item()
        assert seen == pytest.approx(-1.0)

    train(body, max_staleness=0)
