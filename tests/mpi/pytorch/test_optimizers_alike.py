"""Optimizers, schedulers and gradient scalers, which ranks make for themselves: an error where they differ."""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LRScheduler,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

import mpistrat as ms
from mpistrat.checkpoint import Checkpoint, CheckpointManager
from support.rank_errors import assert_usable, errors_of_ranks

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
several_ranks = pytest.mark.mpi(min_size=2)
LAST = RANK == SIZE - 1
NAMES = ["user", "item", "shop", "city", "price"]


@pytest.fixture
def strategy() -> ms.Strategy:
    return ms.MultiWorkerMirroredStrategy(gradients="mean")


def network() -> torch.nn.ModuleDict:
    torch.manual_seed(0)
    return torch.nn.ModuleDict({name: torch.nn.Linear(3, 3) for name in NAMES})


def grouped(model: torch.nn.Module, first: int = 0, **options: Any) -> torch.optim.Optimizer:
    """SGD with a group for each part, of which that of number `first` comes first."""
    groups = [{"params": model[name].parameters()} for name in NAMES[first:] + NAMES[:first]]  # type: ignore[index]
    return torch.optim.SGD(groups, **{"lr": 0.1, "momentum": 0.9, **options})


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    torch.stack([model[name](torch.ones(2, 3)).mean() for name in NAMES]).sum().backward()  # type: ignore[index]
    optimizer.step()


def assert_all_tell(call: Callable[[], Any], *texts: str) -> None:
    errors = errors_of_ranks(call)
    assert {name for name, _, _ in errors} == {"ValueError"}, errors
    for _, message, _ in errors:
        assert all(text in message for text in (*texts, "must be alike on all ranks")), message


ORDER = (
    "parameter 0 of group 0 of SGD ({}) is ModuleDict.user.weight (number 0) on rank 0",
    f"is ModuleDict.item.weight (number 2) on rank {SIZE - 1}. ",
    "sort it",
)


def order(of: str) -> list[str]:
    return [text.format(of) for text in ORDER]


@several_ranks
def test_groups_in_another_order(strategy: ms.Strategy, directory: Path) -> None:
    """With `prepare`; in a first step; as a checkpoint is saved, or restored: before anything is changed."""
    model = network()
    optimizer = grouped(model, first=int(LAST))
    assert_all_tell(lambda: strategy.prepare(model, optimizer), *order("argument 2 of prepare"))
    with strategy.replica():
        before = copy.deepcopy(model.state_dict())
        assert_all_tell(lambda: step(model, optimizer), *order("in a step"))
        torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    manager = CheckpointManager(Checkpoint(model=model, sgd=optimizer), directory)
    assert_all_tell(lambda: manager.save(1), *order("sgd"))
    assert manager.checkpoints == []
    same = grouped(model)
    path = CheckpointManager(Checkpoint(model=model, sgd=same), directory).save(1)
    with torch.no_grad():
        model["user"].weight.zero_()
    assert_all_tell(lambda: manager.restore(path), *order("sgd"))
    state = Checkpoint(model=model, sgd=same).state_dict()
    assert_all_tell(lambda: manager.checkpoint.load_state_dict(state), *order("sgd"))
    assert not model["user"].weight.any()
    assert_usable(strategy)


def scheduled(optimizer: torch.optim.Optimizer) -> LRScheduler:
    schedulers = [StepLR(optimizer, 3), StepLR(optimizer, 5 + LAST)]
    return SequentialLR(optimizer, schedulers, milestones=[2])  # type: ignore[arg-type]


def stepped(optimizer: torch.optim.Optimizer) -> LRScheduler:
    scheduler = StepLR(optimizer, 3)
    if LAST:
        scheduler.step()
    return scheduler


DIFFERENCES: list[tuple[Callable[[torch.nn.Module], Any], str, str]] = [
    (lambda m: grouped(m, lr=0.1 * (1 + LAST)), "lr of group 0 of SGD (argument 2 of prepare) is 0.1", "is 0.2"),
    (lambda m: grouped(m, lr=torch.tensor(0.5 + LAST)), "lr of group 0", "is 1.5"),
    (lambda m: grouped(m, nesterov=not LAST), "nesterov of group 0", "is False"),
    (lambda m: torch.optim.Adam(m.parameters(), betas=(0.9, 0.9 + 0.05 * LAST)), "is [0.9, 0.9]", "is [0.9, 0.95]"),
    (lambda m: (torch.optim.Adam if LAST else torch.optim.SGD)(m.parameters(), 0.1), "of SGD", "of Adam"),
    (lambda m: torch.optim.SGD([*m.parameters()][: 8 + LAST], 0.1), "params of group 0", "is 9"),
    (lambda m: stepped(grouped(m)), "last_epoch of StepLR (argument 2 of prepare) is 0", "is 1"),
    (lambda m: CosineAnnealingLR(grouped(m), T_max=10 + LAST), "T_max of CosineAnnealingLR", "is 11"),
    (lambda m: scheduled(grouped(m)), "_schedulers of SequentialLR", "'step_size': 6"),
    (lambda m: torch.amp.GradScaler("cpu", init_scale=2.0 ** (10 + LAST)), "scale of GradScaler", "is 2048.0"),
    (lambda m: torch.amp.GradScaler("cpu", growth_interval=7 + LAST), "growth_interval", "is 8"),
    (lambda m: torch.amp.GradScaler("cpu", enabled=not LAST), "scale of GradScaler", "nothing on rank"),
]  # fmt: skip


@several_ranks
def test_what_prepare_compares(strategy: ms.Strategy) -> None:
    """Classes, options, schedulers and gradient scalers; the message has both sides."""
    model = network()
    strategy.prepare(model)
    for build, first, other in DIFFERENCES:
        built = build(model)
        assert_all_tell(lambda: strategy.prepare(model, built), first, other, "on rank 0")  # noqa: B023
    assert_usable(strategy)


class OfTheProgram(LRScheduler):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.rank, self.device = RANK, f"cuda:{RANK}"
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        return [rate / (1 + self.last_epoch) for rate in self.base_lrs]


class Warmup:
    def __init__(self) -> None:
        self.steps, self.log = 4, print

    def __call__(self, epoch: int) -> float:
        return min(1.0, (1 + epoch) / self.steps)


def test_what_may_differ(strategy: ms.Strategy, directory: Path) -> None:
    """Functions and other objects, a metric, what a scheduler of the program's own keeps, the last bits of numbers."""
    model = network()
    rate = 0.1 * (1 + 1e-13 * RANK)
    optimizer = grouped(model, lr=rate, dampening=float("nan"))
    optimizer.param_groups[0].update(
        name="first", note=object(), call=lambda: RANK, seen={1: {RANK}}
    )
    plateau = ReduceLROnPlateau(optimizer)
    plateau.step(1.0 + RANK)  # type: ignore[arg-type]
    objects = {
        "model": model,
        "optimizer": optimizer,
        "plateau": plateau,
        "lambdas": LambdaLR(optimizer, [Warmup(), *(lambda epoch: 1.0 for _ in NAMES[1:])]),
        "own": OfTheProgram(optimizer),
        "scaler": torch.amp.GradScaler("cpu", enabled=False),
    }
    lazy = torch.nn.LazyLinear(2)
    strategy.prepare(*objects.values(), lazy, torch.optim.SGD(lazy.parameters(), 0.1))
    with strategy.replica():
        step(model, optimizer)
    for name in ("note", "call", "seen"):  # what a checkpoint does not keep
        del optimizer.param_groups[0][name]
    del objects["lambdas"]
    CheckpointManager(Checkpoint(**objects), directory).save(1)


@several_ranks
def test_a_state_that_one_rank_alone_has_loaded(strategy: ms.Strategy) -> None:
    """Options are compared by name: torch gives loaded ones another order, and the saved state may have more."""
    model = network()
    lr = "lr of group 0 of SGD (argument 2 of prepare)"
    more = {"initial_lr": 0.4}
    for added, rank_0, last in (
        ({}, f"{lr} is 0.1", f"{lr} is 0.7"),
        (more, "nothing", f"initial_{lr} is 0.4"),
    ):
        optimizer, saved = grouped(model), grouped(model, lr=0.1 if added else 0.7)
        saved.param_groups[0].update(added)
        if LAST:
            optimizer.load_state_dict(saved.state_dict())
        assert_all_tell(
            functools.partial(strategy.prepare, model, optimizer),
            f"{rank_0} on rank 0, and {last} on rank {SIZE - 1}. ",
        )
    if LAST:
        optimizer.load_state_dict(grouped(model).state_dict())  # what it has, in another order
    strategy.prepare(model, optimizer)


@several_ranks
def test_the_first_step_of_a_gradient_scaler(strategy: ms.Strategy) -> None:
    """A scaler of another scale would unscale the same gradients otherwise: nothing is stepped."""
    model = network()
    optimizer = grouped(model)
    strategy.prepare(model, optimizer)

    def scaled_step(scaler: torch.amp.GradScaler) -> None:
        optimizer.zero_grad()
        loss = model["user"](torch.ones(2, 3)).mean()
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()

    with strategy.replica():
        same = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        scaled_step(same)
        scaled_step(same)
        before = model["user"].weight.clone()
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0 * (1 + LAST))
        text = "scale of GradScaler (in a step) is 4.0 on rank 0"
        assert_all_tell(lambda: scaled_step(scaler), text, f"is 8.0 on rank {SIZE - 1}")
        assert torch.equal(before, model["user"].weight)
    assert_usable(strategy)


@several_ranks
def test_the_first_step_of_a_scheduler(strategy: ms.Strategy) -> None:
    """Where its optimizer trains; one rank alone may step one of another optimizer."""
    model = network()
    optimizer = grouped(model)
    strategy.prepare(model, optimizer)
    schedule = CosineAnnealingLR(optimizer, T_max=10 + LAST)
    with strategy.replica():
        if LAST:
            copy.deepcopy(schedule).step()
        step(model, optimizer)
        if LAST:
            stepped(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1))
        assert_all_tell(
            schedule.step, "T_max of CosineAnnealingLR (in a step) is 10", "is 11 on rank"
        )
        same = StepLR(optimizer, 1)
        same.step()
        same.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


@several_ranks
def test_an_optimizer_that_computes_gradients_itself(strategy: ms.Strategy) -> None:
    """Its first step comes before any reduction: it is compared at the second."""
    model = network()
    strategy.mirror(model)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1 + LAST, max_iter=1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model["user"](torch.ones(2, 3)).square().mean()
        loss.backward()
        return loss

    with strategy.replica():
        optimizer.step(closure)  # type: ignore[arg-type]
        text = "lr of group 0 of LBFGS (in a step) is 0.1 on rank 0"
        assert_all_tell(lambda: optimizer.step(closure), text)  # type: ignore[arg-type]


def test_a_rank_that_steps_alone_where_nothing_is_reduced(strategy: ms.Strategy) -> None:
    model = network()
    strategy.mirror(model)
    optimizer = grouped(model)
    with strategy.replica(), strategy.no_sync():
        if RANK == 0:
            step(model, optimizer)
    strategy.mirror(model)
    assert model["user"].weight.grad is not None or RANK


@several_ranks
def test_the_first_step_of_several_replicas_in_a_rank() -> None:
    strategy = ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"], gradients="mean")
    model = network()
    strategy.mirror(model)
    optimizers = grouped(model), grouped(model, lr=0.1 + LAST)
    strategy.run(step, (model, optimizers[0]))
    text = "lr of group 0 of SGD (in a step) is 0.1 on rank 0"
    assert_all_tell(lambda: strategy.run(step, (model, optimizers[1])), text, "is 1.1")


@several_ranks
def test_a_group_that_comes_later(strategy: ms.Strategy, directory: Path) -> None:
    """Compared at the next step, and at the next save; a rank alone that has one is told so."""
    model = network()
    head = list(model["user"].parameters())
    optimizer = torch.optim.SGD(head, 0.1)
    strategy.prepare(model, optimizer)
    manager = CheckpointManager(Checkpoint(model=model, optimizer=optimizer), directory)
    with strategy.replica():
        step(model, optimizer)
        optimizer.add_param_group({"params": model["item"].parameters()})
        step(model, optimizer)
        optimizer.add_param_group({"params": model["price" if LAST else "shop"].parameters()})
        texts = [f"(in a step) is ModuleDict.{name}.weight" for name in ("shop", "price")]
        for _ in range(2):
            assert_all_tell(lambda: step(model, optimizer), *texts)
        if not LAST:
            optimizer.param_groups.pop()

        def two_steps() -> None:
            for _ in range(2):
                step(model, optimizer)

        errors = errors_of_ranks(two_steps)
        assert {name for name, _, _ in errors} == {"CollectiveMismatchError"}, errors
        assert all("optimizers, schedulers and gradient scalers" in text for _, text, _ in errors)
    assert_all_tell(lambda: manager.save(1), "nothing on rank 0, and parameter 0 of group 2")


def test_parameters_that_are_dealt_out(strategy: ms.Strategy, directory: Path) -> None:
    """As by `ZeroRedundancyOptimizer`: each rank steps its own. A checkpoint would keep those of rank 0."""
    model = network()
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters[RANK::SIZE])
    strategy.prepare(model, optimizer)
    with strategy.replica():
        step(model, optimizer)
        for i, parameter in enumerate(parameters):
            strategy.extended.communicator.broadcast(parameter.data, i % SIZE)
    manager = CheckpointManager(Checkpoint(model=model, optimizer=optimizer), directory)
    if SIZE == 1:
        manager.save(1)
    else:
        assert_all_tell(lambda: manager.save(1), "parameter 0 of group 0 of Adam (optimizer)")


@several_ranks
def test_what_a_restore_makes_equal(strategy: ms.Strategy, directory: Path) -> None:
    """Rates, schedulers and states may differ until then; a save compares them."""
    model = network()
    optimizer = grouped(model)
    schedule = StepLR(optimizer, 1)
    strategy.prepare(model, optimizer, schedule)
    checkpoint = Checkpoint(model=model, optimizer=optimizer, schedule=schedule)
    manager = CheckpointManager(checkpoint, directory)
    with strategy.replica():
        step(model, optimizer)
    manager.save(1)
    if LAST:
        schedule.step()
        optimizer.state.clear()
    assert_all_tell(lambda: manager.save(2), "lr of group 0 of SGD (optimizer) is 0.1", "is 0.01")
    assert manager.restore_or_initialize() == manager.latest_checkpoint
    assert [group["lr"] for group in optimizer.param_groups] == [0.1] * 5
    assert len(optimizer.state) == 10
    manager.save(2)
    if LAST:
        schedule.last_epoch += 1
    assert_all_tell(lambda: manager.save(3), "last_epoch of StepLR (schedule) is 0", "is 1 on rank")
