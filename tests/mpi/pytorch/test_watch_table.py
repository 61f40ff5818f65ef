"""Each kind of value that the watch compares, after a step and at a save; right programs are silent."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

import mpistrat as ms
from mpistrat.checkpoint import Checkpoint, CheckpointManager
from mpistrat.errors import DivergenceError
from support.rank_errors import assert_usable, errors_of_ranks

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
LAST = SIZE - 1
EPS = torch.finfo(torch.float64).eps


class Net(torch.nn.Linear):
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__(3, 2, dtype=torch.float64)
        self.register_buffer("mask", torch.tensor([1.0, 2.0, -torch.inf]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.mask[:2]


class Training:
    """Each rank has other examples, and a loss that its scaler scales by 4 or more."""

    def __init__(self, strategy: ms.Strategy) -> None:
        self.strategy = strategy
        torch.manual_seed(0)
        self.net = Net()
        self.optimizer: Any = torch.optim.Adam(self.net.parameters(), 1e-2)
        strategy.prepare(self.net, self.optimizer)
        warmup = LinearLR(self.optimizer, total_iters=2)
        cosine = CosineAnnealingLR(self.optimizer, 9)
        schedulers: list[LRScheduler] = [warmup, cosine]
        self.scheduler = SequentialLR(self.optimizer, schedulers, milestones=[2])
        self.scaler: Any = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        with strategy.scope():
            self.count: Any = ms.Variable(np.zeros(3), name="count")

    def train(self, spoil: Callable[[Any], Any] | None = None, last: int = 9) -> None:
        """Make `last` steps. After the third, the last rank calls `spoil`."""
        for number in range(last):
            self.optimizer.zero_grad()
            loss = self.net(torch.full((2, 3), 1.0 + RANK, dtype=torch.float64)).square().mean()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            if number == 2 and spoil is not None and RANK == LAST:
                with torch.no_grad():
                    spoil(self)

    def manager(self, directory: Path) -> CheckpointManager:
        return CheckpointManager(Checkpoint(net=self.net, optimizer=self.optimizer), directory)

    def state_of(self, parameter: torch.Tensor) -> Any:
        return self.optimizer.state[parameter]

    def load_scale(self) -> None:
        self.scaler.load_state_dict({**self.scaler.state_dict(), "scale": 64.0})


SPOILS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "parameter": (lambda t: t.net.bias.add_(1), "Net.bias is "),
    "buffer": (lambda t: t.net.mask.data.add_(1), "Net.mask is 1.0 on ran"),
    "option": (lambda t: t.optimizer.param_groups[0].update(eps=0.5), "Adam: eps of group 0 is 1e-08"),
    "state": (lambda t: t.state_of(t.net.bias)["exp_avg"].add_(1), "Net.weight is |Net.bias is "),
    "steps": (lambda t: t.state_of(t.net.bias)["step"].add_(1), "Net.bias is "),
    "scheduler": (lambda t: setattr(t.scheduler, "last_epoch", 7), "last_epoch of SequentialLR is "),
    "nested scheduler": (
        lambda t: setattr(t.scheduler._schedulers[0], "total_iters", 4),
        "total_iters of LinearLR is 2 on ran",
    ),
    "scaler": (lambda t: t.load_scale(), "scale of GradScaler is "),
    "training": (lambda t: t.net.eval(), "Net.training is True on ran"),
}  # fmt: skip


@pytest.fixture
def strategy() -> ms.Strategy:
    return ms.MultiWorkerMirroredStrategy(gradients="mean")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", SPOILS)
def test_a_value_of_each_kind_is_told_of(
    drifting: None, strategy: ms.Strategy, kind: str, notices: list[str]
) -> None:
    spoil, text = SPOILS[kind]
    with strategy.replica():
        Training(strategy).train(spoil)
    found = [said for said in notices if "drifted apart" in said]
    assert len(found) == (RANK == 0), found
    for said in found:
        assert any(part in said for part in text.split("|")), said
        assert "between optimizer steps 2 and 4" in said


class AtTheStepOfRank0(Training):
    """A prepared scheduler that rank 0 alone steps; then it sends the rate."""

    def __init__(self, strategy: ms.Strategy) -> None:
        super().__init__(strategy)
        self.alone = CosineAnnealingLR(self.optimizer, 9)
        strategy.prepare(self.alone)

    def train(self, spoil: Callable[[Any], Any] | None = None, last: int = 9) -> None:
        super().train(spoil)
        if RANK == 0:
            self.alone.step()
        (group,) = self.optimizer.param_groups
        group["lr"] = MPI.COMM_WORLD.bcast(group["lr"])
        self.scheduler.step()
        super().train(spoil)


def overflow(training: Training) -> None:
    """Gradients overflow on this rank: all ranks leave out the step, and halve their scales."""
    for parameter in training.net.parameters():
        parameter.register_hook(lambda gradient: gradient * torch.inf)


@pytest.mark.parametrize("make", [Training, AtTheStepOfRank0])
@pytest.mark.parametrize("spoil", [None, overflow])
def test_right_programs_are_silent(
    strategy: ms.Strategy,
    make: type[Training],
    spoil: Callable[[Training], Any] | None,
    directory: Path,
    notices: list[str],
) -> None:
    with strategy.replica():
        training = make(strategy)
        training.train(spoil)
        training.count.assign_add(np.ones(3))
        training.manager(directory).save(1)
    assert not [said for said in notices if "differ" in said or "drifted" in said]


def write_variable(training: Training) -> None:
    training.count.values[0].read_value()[1] = 7.0


def rounding_and_bias(training: Training) -> None:
    training.net.weight *= 1 + EPS
    training.net.bias += 0.5


AT_SAVES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "variable": (write_variable, "variable 'count'"),
    "the first tensor differs by rounding": (rounding_and_bias, "Net.bias"),
    "infinities have no norm": (lambda t: t.net.mask.data[1:2].add_(1e-3), "Net.mask"),
    "state": (lambda t: t.state_of(t.net.bias)["exp_avg_sq"].add_(1), "Adam: exp_avg_sq of Net.bias"),
}  # fmt: skip


@pytest.mark.parametrize("kind", AT_SAVES)
def test_a_save_compares_whole_arrays(strategy: ms.Strategy, kind: str, directory: Path) -> None:
    spoil, name = AT_SAVES[kind]
    with strategy.replica():
        training = Training(strategy)
        training.train()
        if RANK == LAST:
            with torch.no_grad():
                spoil(training)
        manager = training.manager(directory)
        if SIZE == 1:
            manager.save(1)
            return
        with pytest.raises(DivergenceError) as caught:
            manager.save(1)
        assert caught.value.name == name
        assert caught.value.ranks == ((LAST,) if SIZE > 2 else ())
    assert_usable(strategy)


@pytest.mark.mpi(min_size=2)
def test_work_is_saved_before_the_error(
    strategy: ms.Strategy, directory: Path, notices: list[str]
) -> None:
    """The samples of the fourth step have not been compared yet."""
    with strategy.replica():
        training = Training(strategy)
        training.train(SPOILS["parameter"][0], last=4)
        manager = training.manager(directory)
        errors = errors_of_ranks(lambda: manager.save(4))
    assert {kind for kind, _, _ in errors} == {"DivergenceError"}
    assert all("is marked as differing" in text for _, text, _ in errors), errors
    assert manager.latest_checkpoint is not None
    said = [text for text in notices if "drifted apart" in text]
    assert len(said) == (RANK == 0)


def test_a_rank_that_cannot_be_read_at_a_save(strategy: ms.Strategy, directory: Path) -> None:
    """All ranks raise, and nothing is written."""
    with strategy.replica():
        training = Training(strategy)
        training.train()
        manager = training.manager(directory)
        if RANK == LAST:
            training.count.values[0].read_value = lambda: 1 / 0
        errors = errors_of_ranks(lambda: manager.save(1))
    kinds = {kind for kind, _, _ in errors}
    if SIZE > 1:
        assert kinds <= {"ZeroDivisionError", "CollectiveMismatchError"}, errors
        assert manager.checkpoints == []
