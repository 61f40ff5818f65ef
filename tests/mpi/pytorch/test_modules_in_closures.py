"""Torch modules in scheduled functions. Rank 0 is the chief, the last ranks serve, those between are workers."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpistrat as ms
from mpistrat.coordinator import ClusterCoordinator

pytestmark = pytest.mark.mpi(min_size=3)

SIZE = MPI.COMM_WORLD.size
FixedShards = ms.experimental.partitioners.FixedShardsPartitioner
Program = Callable[[Any, ClusterCoordinator], None]


def on_chief(program: Program, workers: int = 1, partitioner: Any = None) -> None:
    try:
        strategy = ms.ParameterServerStrategy(
            num_ps=SIZE - 1 - workers, variable_partitioner=partitioner
        )
    except SystemExit:
        return
    try:
        program(strategy, ClusterCoordinator(strategy))
    finally:
        strategy.shutdown()


class Counting(torch.nn.Module):
    """Counts examples: it puts another tensor in its buffer's place."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + len(x)
        return x


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 5),
        torch.nn.Tanh(),
        torch.nn.BatchNorm1d(5),
        Counting(),
        torch.nn.Linear(5, 3),
    )


def batch(step: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(step).normal(size=(4, 6))).float()


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05),
}


def stepping(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Any], float]:
    def step(x: torch.Tensor) -> float:
        loss = (model(x) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def made(strategy: Any, make: Callable[[Any], torch.optim.Optimizer]) -> tuple[Any, Any, Any]:
    """A model, its optimizer, and a function to be scheduled that steps."""
    with strategy.scope():
        model = net()
        optimizer = make(model.parameters())
    step = stepping(model, optimizer)
    return model, optimizer, lambda number: strategy.run(step, args=(batch(number),))


def assert_same(got: Any, wanted: Any) -> None:
    """Nests of tensors and numbers."""
    torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_one_worker_trains_as_one_process_does(name: str, split: bool) -> None:
    """Also where the chief changes the learning rate."""

    def program(strategy: Any, coordinator: ClusterCoordinator) -> None:
        model, optimizer, step = made(strategy, MAKERS[name])
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        alone = net()
        its_optimizer = MAKERS[name](alone.parameters())
        step_alone = stepping(alone, its_optimizer)
        its_scheduler = torch.optim.lr_scheduler.ExponentialLR(its_optimizer, 0.5)
        for epoch in range(3):
            losses = [coordinator.schedule(step, args=(4 * epoch + i,)) for i in range(4)]
            scheduler.step()  # not for what is scheduled already
            coordinator.join()
            expected = [step_alone(batch(4 * epoch + i)) for i in range(4)]
            its_scheduler.step()
            assert coordinator.fetch(losses) == pytest.approx(expected, rel=1e-4)
            assert_same(list(model.parameters()), list(alone.parameters()))
        assert not optimizer.state
        assert_same(model.state_dict(), alone.state_dict())
        assert_same(optimizer.state_dict()["state"], its_optimizer.state_dict()["state"])
        assert not optimizer.state

    on_chief(program, partitioner=FixedShards(2) if split else None)


def test_workers_train_one_model() -> None:
    """Each with data of its own, at the same time."""

    def program(strategy: Any, coordinator: ClusterCoordinator) -> None:
        model, optimizer, _ = made(strategy, MAKERS["adam"])
        step = stepping(model, optimizer)

        def examples() -> Iterator[torch.Tensor]:
            worker = ms.coordinator.experimental_get_current_worker_index()
            for number in range(100):
                yield batch(100 * worker + number)

        def scheduled(batches: Iterator[torch.Tensor]) -> Any:
            return strategy.run(step, args=(next(batches),))

        batches = iter(coordinator.create_per_worker_dataset(examples))
        losses = [coordinator.schedule(scheduled, args=(batches,)) for _ in range(60)]
        coordinator.join()
        losses = coordinator.fetch(losses)
        assert np.mean(losses[-10:]) < 0.5 * np.mean(losses[:5])
        assert int(model[2].num_batches_tracked) == 60  # type: ignore[index]
        assert float(model[3].seen) == 240  # type: ignore[index]
        states = optimizer.state_dict()["state"].values()
        assert [int(state["step"]) for state in states] == [60] * 6

    on_chief(program, workers=SIZE - 2)


def test_what_a_function_did_before_it_is_repeated_counts_once() -> None:
    def program(strategy: Any, coordinator: ClusterCoordinator) -> None:
        model, _, step = made(strategy, MAKERS["sgd"])

        def twice() -> None:
            step(0)
            with strategy.extended.job.client.numbers.within(
                1
            ):  # as a worker that repeats the first does
                step(0)

        coordinator.schedule(twice)
        coordinator.join()
        alone = net()
        stepping(alone, MAKERS["sgd"](alone.parameters()))(batch(0))
        assert_same(model.state_dict(), alone.state_dict())

    on_chief(program)


def test_the_chief_reads_what_the_servers_have() -> None:
    """With `state_dict`, `run` and `join`; plain reads do not ask them."""

    def program(strategy: Any, coordinator: ClusterCoordinator) -> None:
        model, _, step = made(strategy, MAKERS["sgd"])
        first = {name: value.clone() for name, value in model.state_dict().items()}
        weight = model[0].weight
        for number, read in enumerate(
            (model.state_dict, lambda: strategy.run(lambda: None), coordinator.join)
        ):
            coordinator.schedule(step, args=(number,)).get()
            before = weight.detach().clone()
            assert_same(before, weight.detach())
            read()
            assert not torch.equal(weight, before)
        assert not torch.equal(weight, first["0.weight"])
        assert coordinator.schedule(lambda: weight).get() is weight

    on_chief(program)


def test_the_chief_writes_between_functions() -> None:
    """States of the module and of the optimizer, and single parameters."""

    def program(strategy: Any, coordinator: ClusterCoordinator) -> None:
        model, optimizer, step = made(strategy, MAKERS["adam"])
        alone = net()
        its_optimizer = MAKERS["adam"](alone.parameters())
        step_alone = stepping(alone, its_optimizer)
        for number in range(3):
            step_alone(batch(number))
        model.load_state_dict(alone.state_dict())
        optimizer.load_state_dict(its_optimizer.state_dict())
        for module in (model, alone):
            with torch.no_grad():
                module[0].bias.fill_(0.5)  # type: ignore[index, operator, union-attr]
        for number in range(3, 6):
            coordinator.schedule(step, args=(number,))
            step_alone(batch(number))
        coordinator.join()
        assert_same(model.state_dict(), alone.state_dict())
        assert_same(optimizer.state_dict()["state"], its_optimizer.state_dict()["state"])

        with torch.no_grad():  # of what was read at the join
            for module in (model, alone):
                module[0].weight.mul_(2)  # type: ignore[index, operator, union-attr]
        coordinator.schedule(step, args=(6,))
        coordinator.join()
        step_alone(batch(6))
        assert_same(model.state_dict(), alone.state_dict())

    on_chief(program)


def test_a_function_has_the_module_as_it_was_when_scheduled() -> None:
    """What a function does to a module, and to gradients, the next one does not see."""

    def program(strategy: Any, coordinator: ClusterCoordinator) -> None:
        model, optimizer, _ = made(strategy, MAKERS["sgd"])
        weight = model[0].weight

        def look() -> Any:
            found = model.training, weight.requires_grad, weight.grad is None
            same = model[0].weight is weight and optimizer.param_groups[0]["params"][0] is weight
            model.train()
            model(batch(0)).sum().backward()
            return *found, same, optimizer.param_groups[0]["lr"]

        assert coordinator.schedule(look).get() == (True, True, True, True, 0.05)
        model.eval()
        assert coordinator.schedule(look).get() == (False, True, True, True, 0.05)
        weight.requires_grad_(False)
        optimizer.param_groups[0]["lr"] = 1.0
        assert coordinator.schedule(look).get() == (False, False, True, True, 1.0)

    on_chief(program)


def test_checkpoint_for_another_number_of_servers(directory: Path) -> None:
    expected: list[Any] = []

    def save(strategy: Any, coordinator: ClusterCoordinator) -> None:
        model, optimizer, step = made(strategy, MAKERS["adam"])
        for number in range(3):
            coordinator.schedule(step, args=(number,))
        coordinator.join()
        checkpoint = ms.checkpoint.Checkpoint(model=model, optimizer=optimizer)
        ms.checkpoint.CheckpointManager(checkpoint, directory).save(3)
        coordinator.schedule(step, args=(3,))
        coordinator.join()
        expected.append(model.state_dict())

    def restore(strategy: Any, coordinator: ClusterCoordinator) -> None:
        model, optimizer, step = made(strategy, MAKERS["adam"])
        coordinator.schedule(step, args=(100,))  # to be undone
        coordinator.join()
        checkpoint = ms.checkpoint.Checkpoint(model=model, optimizer=optimizer)
        assert ms.checkpoint.CheckpointManager(checkpoint, directory).restore_or_initialize()
        coordinator.schedule(step, args=(3,))
        coordinator.join()
        assert_same(model.state_dict(), expected[0])

    on_chief(save, workers=SIZE - 2)
    on_chief(restore, partitioner=FixedShards(2))


def test_embeddings_stay_on_their_servers() -> None:
    def program(strategy: Any, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            table = torch.nn.Embedding(50, 3, sparse=True)
            optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
        before = table.weight.detach().clone()

        def step(indices: torch.Tensor) -> Any:
            optimizer.zero_grad()
            table(indices).sum().backward()
            optimizer.step()
            return type(table.weight).__name__

        kind = coordinator.schedule(lambda: strategy.run(step, args=(torch.tensor([3, 7, 3]),)))
        coordinator.join()
        assert kind.get() == "RemoteRows"
        before[3] -= 2
        before[7] -= 1
        assert_same(table.state_dict()["weight"], before)

    on_chief(program)


def test_what_does_not_work_is_told() -> None:
    def program(strategy: Any, coordinator: ClusterCoordinator) -> None:
        model, optimizer, _ = made(strategy, MAKERS["sgd"])
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        outside = net()
        its_optimizer = MAKERS["sgd"](outside.parameters())
        step_outside = stepping(outside, its_optimizer)

        def writes() -> None:
            with torch.no_grad():
                model[0].weight.zero_()

        def makes_optimizer() -> None:
            stepping(model, torch.optim.SGD(model.parameters(), lr=0.1))(batch(0))

        for message, fn in (
            ("parameter Sequential.0.weight was written in a scheduled function", writes),
            ("a scheduled function has made this optimizer", makes_optimizer),
            ("step of a learning-rate scheduler", lambda: scheduler.step()),
            ("not on the servers", lambda: strategy.run(step_outside, args=(batch(0),))),
        ):
            with pytest.raises(RuntimeError, match=message):
                coordinator.schedule(fn).get()
            with pytest.raises(RuntimeError, match=message):
                coordinator.join()
        before = model.state_dict()["0.weight"].clone()
        assert coordinator.schedule(lambda: model[0].weight.abs().sum() > 0).get()
        assert_same(model.state_dict()["0.weight"], before)

        with strategy.scope():
            lazy = torch.nn.LazyLinear(3)
        with pytest.raises(TypeError, match=r"LazyLinear.weight of a lazy module.*its forward"):
            coordinator.schedule(lambda: lazy(batch(0)))
        lazy(batch(0))
        assert coordinator.schedule(lambda: tuple(lazy(batch(0)).shape)).get() == (4, 3)

        handle = model[4].weight.register_hook(lambda gradient: gradient)
        with pytest.raises(TypeError, match=r"'model'.*Sequential.4.weight has a hook"):
            coordinator.schedule(lambda: model(batch(0)) and None)
        handle.remove()
        model.lock = threading.Lock()
        with pytest.raises(TypeError, match=r"'model' → its attribute 'lock'"):
            coordinator.schedule(lambda: model(batch(0)) and None)

    on_chief(program)
