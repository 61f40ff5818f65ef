"""Ranks that train different models are told of, with the step and the cause; programs that are right are not."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import mpistrat as ms
from support.rank_errors import assert_usable, errors_of_ranks

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
LAST = SIZE - 1
EXAMPLES = 24 * SIZE
STEPS = 4  # of an epoch
several = pytest.mark.mpi(min_size=2)


class Training:
    """A program that trains a small model. Subclasses change one thing."""

    epochs = 3

    def __init__(self, strategy: ms.Strategy) -> None:
        self.strategy = strategy
        torch.manual_seed(0)
        x = torch.randn(EXAMPLES, 4, dtype=torch.float64)
        self.model: Any = self.made()
        self.optimizer: Any = self.optimizer_of(self.model.parameters())
        data = TensorDataset(x, x.sum(1, keepdim=True))
        loader = DataLoader(data, EXAMPLES // STEPS)
        prepared = strategy.prepare(self.model, self.optimizer, loader)
        self.model, self.optimizer, self.loader = prepared
        torch.manual_seed(100 + RANK)
        self.prepared()

    def made(self) -> torch.nn.Module:
        first = torch.nn.Linear(4, 5)
        return torch.nn.Sequential(first, torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()

    def optimizer_of(self, parameters: Iterator[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)

    def prepared(self) -> None:
        """After `prepare`."""

    def train(self) -> None:
        for epoch in range(self.epochs):
            self.begin(epoch)
            for i, (x, y) in enumerate(self.loader):
                self.step(x, y, i)
            self.end(epoch)

    def begin(self, epoch: int) -> None:
        """Before an epoch."""

    def end(self, epoch: int) -> None:
        """After an epoch."""

    def step(self, x: torch.Tensor, y: torch.Tensor, number: int) -> None:
        self.optimizer.zero_grad()
        self.loss(x, y).backward()
        self.changed()
        self.optimizer.step()
        self.stepped()

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mse_loss(self.model(x), y)

    def changed(self) -> None:
        """Between backward() and step()."""

    def stepped(self) -> None:
        """After step()."""


# Programs whose ranks drift apart


class GradOfAutograd(Training):
    def step(self, x: torch.Tensor, y: torch.Tensor, number: int) -> None:
        parameters = list(self.model.parameters())
        gradients = torch.autograd.grad(self.loss(x, y), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()


class GradOfFunc(Training):
    def step(self, x: torch.Tensor, y: torch.Tensor, number: int) -> None:
        def loss(parameters: Any) -> torch.Tensor:
            return mse_loss(torch.func.functional_call(self.model, parameters, x), y)

        named = dict(self.model.named_parameters())
        gradients = torch.func.grad(loss)({name: p.detach() for name, p in named.items()})
        for name, parameter in named.items():
            parameter.grad = gradients[name]
        self.optimizer.step()


class StepInNoSync(Training):
    """The tail of the second epoch."""

    def step(self, x: torch.Tensor, y: torch.Tensor, number: int) -> None:
        is_tail = self.optimizer.epoch == 1 and number == STEPS - 1
        self.optimizer.zero_grad()
        with self.strategy.no_sync() if is_tail else contextlib.nullcontext():
            self.loss(x, y).backward()
        self.optimizer.step()

    def begin(self, epoch: int) -> None:
        self.optimizer.epoch = epoch


class MicroBatchInNoSync(Training):
    def step(self, x: torch.Tensor, y: torch.Tensor, number: int) -> None:
        with contextlib.nullcontext() if number % 2 == 0 else self.strategy.no_sync():
            self.loss(x, y).backward()
        if number % 2:
            self.optimizer.step()
            self.optimizer.zero_grad()


class LoadedOnFirstRank(Training):
    def prepared(self) -> None:
        if RANK == 0:
            state = self.model.state_dict()
            self.model.load_state_dict({name: value + 0.5 for name, value in state.items()})


class LoadedOptimizer(Training):
    def end(self, epoch: int) -> None:
        if epoch == 0 and RANK == LAST:
            state = copy.deepcopy(self.optimizer.state_dict())
            for of_parameter in state["state"].values():
                of_parameter["momentum_buffer"] += 1.0
            self.optimizer.load_state_dict(state)


class AddedByHand(Training):
    def changed(self) -> None:
        self.model[0].weight.grad.add_(float(RANK))


class Noise(Training):
    def changed(self) -> None:
        weight = self.model[0].weight
        weight.grad = weight.grad + torch.randn_like(weight)


class ResetLater(Training):
    def begin(self, epoch: int) -> None:
        if epoch == 1:
            self.model[2].reset_parameters()


class Hebb(Training):
    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.model[0].weight.add_(0.01 * x.mean(0))
        return super().loss(x, y)


class WritesData(Training):
    def stepped(self) -> None:
        self.model[0].weight.data.mul_(1.0 + 0.1 * RANK)


class RateOfOwnLoss(Training):
    def end(self, epoch: int) -> None:
        if epoch == 0:
            self.optimizer.param_groups[0]["lr"] = 0.1 + 0.1 * RANK


class SchedulerOfLastRank(Training):
    def prepared(self) -> None:
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)

    def end(self, epoch: int) -> None:
        self.scheduler.step()
        if epoch == 0 and RANK == LAST:
            self.scheduler.last_epoch += 1


class EvalOnFirstRank(Training):
    def end(self, epoch: int) -> None:
        if RANK == 0:
            self.model.eval()


class LateMask(Training):
    def begin(self, epoch: int) -> None:
        if epoch == 1:
            self.mask = torch.rand(5, 4) > 0.5

    def stepped(self) -> None:
        if hasattr(self, "mask"):
            self.model[0].weight.data.mul_(self.mask)


UNREDUCED = "no backward() reduced the gradients of step 1"
WRITTEN = "0.weight was written outside optimizer.step()"
DRIFTING: dict[type[Training], tuple[str, ...]] = {
    GradOfAutograd: ("Sequential.0.weight is ", "between optimizer steps 0 and 1", UNREDUCED),
    GradOfFunc: ("Sequential.0.weight is ", "between optimizer steps 0 and 1", UNREDUCED),
    StepInNoSync: ("between optimizer steps 4 and 8", "no_sync gave gradients of step 8"),
    MicroBatchInNoSync: ("between optimizer steps 0 and 1", "no_sync gave gradients of step 1"),
    LoadedOnFirstRank: ("steps 0 and 1", WRITTEN + " on rank 0"),
    LoadedOptimizer: ("steps 4 and 8", "Sequential.0.weight is ", "loaded a state"),
    AddedByHand: ("steps 0 and 1", "some .grad was written after backward()"),
    Noise: ("steps 0 and 1", "some .grad was written", "generators differ"),
    ResetLater: ("Sequential.2.weight is ", "steps 4 and 8", "2.weight was written outside"),
    Hebb: ("Sequential.0.weight is ", "steps 0 and 1", WRITTEN),
    WritesData: ("Sequential.0.weight is ", "steps 1 and 2", ".data"),
    RateOfOwnLoss: ("SGD: lr of group 0 is 0.1 on rank 0, 0.2 on rank 1", "4 and 8", "own loss"),
    SchedulerOfLastRank: ("last_epoch of ExponentialLR is 1 on rank", "4 and 8", "scheduler"),
    EvalOnFirstRank: ("Sequential.training is False on rank 0, True on rank", "train() or eval()"),
    LateMask: ("Sequential.0.weight is ", "steps 4 and 8", ".data", "generators differ"),
}


@pytest.fixture
def strategy() -> ms.Strategy:
    return ms.MultiWorkerMirroredStrategy()


def drifts(said: list[str]) -> list[str]:
    return [text for text in said if "drifted apart" in text]


@several
@pytest.mark.parametrize("program", DRIFTING, ids=lambda program: program.__name__)
def test_drift_is_told_once_by_the_first_rank(
    drifting: None, strategy: ms.Strategy, program: type[Training], notices: list[str]
) -> None:
    with strategy.replica():
        trained = program(strategy)
        trained.train()
        trained.model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    found = drifts(notices)
    assert len(found) == (RANK == 0), found
    for text in found:
        assert not [part for part in DRIFTING[program] if part not in text], text


@several
def test_drift_is_an_error_on_all_ranks_if_the_program_asks(strategy: ms.Strategy) -> None:
    with strategy.replica():
        errors = errors_of_ranks(AddedByHand(strategy).train)
    assert {kind for kind, _, _ in errors} == {"DivergenceError"}
    assert len({text for _, text, _ in errors}) == 1
    assert_usable(strategy)


# Programs that are right


class Clipped(Training):
    def changed(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)


class Accumulating(Training):
    def step(self, x: torch.Tensor, y: torch.Tensor, number: int) -> None:
        with self.strategy.no_sync() if number % 2 == 0 else contextlib.nullcontext():
            self.loss(x, y).backward()
        if number % 2:
            self.optimizer.step()
            self.optimizer.zero_grad()


class OwnAllReduce(Training):
    """Gradients of autograd.grad, and a reduction by the program."""

    def step(self, x: torch.Tensor, y: torch.Tensor, number: int) -> None:
        parameters = list(self.model.parameters())
        gradients = torch.autograd.grad(self.loss(x, y), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, gradient.numpy())
            parameter.grad = gradient / SIZE
        self.optimizer.step()


class Averaging(Training):
    """Local steps; after each the program averages the parameters."""

    def step(self, x: torch.Tensor, y: torch.Tensor, number: int) -> None:
        with self.strategy.no_sync():
            super().step(x, y, number)

    def optimizer_of(self, parameters: Iterator[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    def stepped(self) -> None:
        for parameter in self.model.parameters():
            MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, parameter.detach().numpy())
            parameter.data /= SIZE


class Gan(Training):
    def prepared(self) -> None:
        self.critic = self.made()
        self.of_critic = torch.optim.Adam(self.critic.parameters(), 1e-2)
        self.critic, self.of_critic = self.strategy.prepare(self.critic, self.of_critic)

    def step(self, x: torch.Tensor, y: torch.Tensor, number: int) -> None:
        made = x + self.model(x)
        self.of_critic.zero_grad()
        (self.critic(made.detach()).mean() - self.critic(x).mean()).backward()
        self.of_critic.step()
        self.optimizer.zero_grad()
        (-self.critic(made).mean()).backward()
        self.optimizer.step()


class Maml(Training):
    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        fast = dict(self.model.named_parameters())
        loss = mse_loss(torch.func.functional_call(self.model, fast, x), y)
        gradients = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
        pairs = zip(fast.items(), gradients, strict=True)
        fast = {name: p - 0.1 * gradient for (name, p), gradient in pairs}
        return mse_loss(torch.func.functional_call(self.model, fast, x), y)


class SharpnessAware(Training):
    """The first step is local."""

    def step(self, x: torch.Tensor, y: torch.Tensor, number: int) -> None:
        parameters = list(self.model.parameters())
        before = [p.detach().clone() for p in parameters]
        with self.strategy.no_sync():
            self.loss(x, y).backward()
        with torch.no_grad():
            for p in parameters:
                p.add_(0.05 * p.grad)
        self.optimizer.zero_grad()
        self.loss(x, y).backward()
        with torch.no_grad():
            for p, kept in zip(parameters, before, strict=True):
                p.copy_(kept)
        self.optimizer.step()


class WeightNoise(Training):
    """Noise of each rank, taken back before the step, or after it."""

    takes_back_late = False

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weight = self.model[0].weight
        self.kept = weight.detach().clone()
        with torch.no_grad():
            weight += 0.1 * torch.randn_like(weight)
        return super().loss(x, y)

    def changed(self) -> None:
        with torch.no_grad():
            self.model[0].weight.copy_(self.kept)


class Averaged(Training):
    def prepared(self) -> None:
        self.average = torch.optim.swa_utils.AveragedModel(self.model)

    def stepped(self) -> None:
        self.average.update_parameters(self.model)


class Frozen(Training):
    def made(self) -> torch.nn.Module:
        model = super().made()
        model[0].requires_grad_(False)  # type: ignore[index]
        return model

    def begin(self, epoch: int) -> None:
        self.model[0].requires_grad_(epoch > 0)


class Lbfgs(Training):
    def optimizer_of(self, parameters: Iterator[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(parameters, max_iter=3)

    def step(self, x: torch.Tensor, y: torch.Tensor, number: int) -> None:
        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.loss(x, y)
            loss.backward()
            return loss

        self.optimizer.step(closure)


class PlateauWithBroadcast(Training):
    """Each rank steps by its own loss, and takes the first rank's rate."""

    def prepared(self) -> None:
        schedulers = torch.optim.lr_scheduler
        self.plateau = schedulers.ReduceLROnPlateau(self.optimizer, patience=0, factor=0.5)
        self.cosine = schedulers.CosineAnnealingLR(self.optimizer, 9)

    def end(self, epoch: int) -> None:
        self.cosine.step()
        self.plateau.step(float(RANK + epoch))
        (group,) = self.optimizer.param_groups
        group["lr"] = MPI.COMM_WORLD.bcast(group["lr"])


class EvaluationOnFirstRank(Training):
    def begin(self, epoch: int) -> None:
        self.model.train()

    def end(self, epoch: int) -> None:
        if RANK == 0:
            self.model.eval()
            with torch.no_grad():
                self.model(torch.ones(1, 4, dtype=torch.float64))


class BatchNorm(Training):
    def made(self) -> torch.nn.Module:
        layers = torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1)
        return torch.nn.Sequential(*layers).double()


class Diverged(Training):
    """All numbers are NaN."""

    def optimizer_of(self, parameters: Iterator[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e300)


class OwnState(torch.optim.SGD):
    """An optimizer of the program, with a state of each rank."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["error"] = torch.full_like(parameter, float(RANK))


class ErrorFeedback(Training):
    def optimizer_of(self, parameters: Iterator[torch.Tensor]) -> torch.optim.Optimizer:
        return OwnState(parameters, lr=0.1)


class PerRankHead(AddedByHand):
    def prepared(self) -> None:
        ms.may_differ(self.model[0])

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The rest of the model has equal gradients on all ranks."""
        with torch.no_grad():
            self.model[0](x)
        return mse_loss(self.model[2](torch.ones(1, 5, dtype=torch.float64)), y[:1] * 0)

    def changed(self) -> None:
        self.model[0].weight.grad = torch.full_like(self.model[0].weight, float(RANK))


class LocalSteps(Training):
    """Each rank trains alone for an epoch; then the program averages, and says that ranks may differ."""

    def prepared(self) -> None:
        ms.may_differ(self.model)

    def step(self, x: torch.Tensor, y: torch.Tensor, number: int) -> None:
        with self.strategy.no_sync():
            super().step(x, y, number)

    def end(self, epoch: int) -> None:
        for parameter in self.model.parameters():
            MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, parameter.detach().numpy())
            parameter.data /= SIZE


class Experts(Training):
    """Each rank has an expert of its own, which no strategy mirrors."""

    def prepared(self) -> None:
        torch.manual_seed(RANK)
        self.expert = torch.nn.Linear(4, 1).double()

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mse_loss(self.model(x) + self.expert(x), y)

    def stepped(self) -> None:
        with torch.no_grad():
            for parameter in self.expert.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None


class DealtOut(Training):
    """Each rank has an optimizer of its own parameters, and then sends their values."""

    def optimizer_of(self, parameters: Iterator[torch.Tensor]) -> torch.optim.Optimizer:
        self.all = list(parameters)
        own = [p for i, p in enumerate(self.all) if i % SIZE == RANK]
        return torch.optim.SGD(own, lr=0.1 / (1 + RANK))

    def stepped(self) -> None:
        for i, parameter in enumerate(self.all):
            MPI.COMM_WORLD.Bcast(parameter.detach().numpy(), i % SIZE)


RIGHT = [
    *(Training, Clipped, Accumulating, OwnAllReduce, Averaging, Gan, Maml, SharpnessAware),
    *(WeightNoise, Averaged, Frozen, Lbfgs, PlateauWithBroadcast, EvaluationOnFirstRank),
    *(BatchNorm, Diverged, ErrorFeedback, PerRankHead, LocalSteps, Experts, DealtOut),
]


@pytest.mark.parametrize("program", RIGHT, ids=lambda program: program.__name__)
def test_programs_that_are_right(
    strategy: ms.Strategy, program: type[Training], notices: list[str]
) -> None:
    with strategy.replica():
        program(strategy).train()
    assert not drifts(notices)


@several
def test_the_watch_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, notices: list[str]) -> None:
    monkeypatch.setenv("MPISTRAT_ON_DRIFT", "off")
    strategy = ms.MultiWorkerMirroredStrategy()
    with strategy.replica():
        AddedByHand(strategy).train()
    assert not drifts(notices)


class Saving(Training):
    """A program that saves at its end."""

    shift = 0.5

    def prepared(self) -> None:
        with torch.no_grad():
            self.model[2].bias += self.shift * RANK

    def save(self, directory: Path) -> ms.checkpoint.CheckpointManager:
        checkpoint = ms.checkpoint.Checkpoint(model=self.model, optimizer=self.optimizer)
        manager = ms.checkpoint.CheckpointManager(checkpoint, directory)
        self.train()
        return manager


def test_a_save_of_ranks_that_differ(
    drifting: None, strategy: ms.Strategy, directory: Path, notices: list[str]
) -> None:
    with strategy.replica():
        program = Saving(strategy)
        manager = program.save(directory)
        errors = errors_of_ranks(lambda: manager.save(12, wait=False))
        assert {kind for kind, _, _ in errors} == {"DivergenceError" if SIZE > 1 else ""}
        if SIZE > 1:
            assert all("Sequential.2.bias is not the same" in text for _, text, _ in errors)
            assert all("has rank 0's values, and is marked" in text for _, text, _ in errors)
        manager.wait()
        assert str(manager.latest_checkpoint).endswith("step-00000012")
        manager.restore(str(manager.latest_checkpoint))
        assert any("ranks differed in" in text for text in notices) == (SIZE > 1 and RANK == 0)
        manager.save(13)  # all ranks have rank 0's values
        ms.may_differ(program.model)
        program.train()
        with torch.no_grad():
            program.model[2].bias += RANK
        manager.save(14)
    assert_usable(strategy)


def test_a_save_of_ranks_that_differ_in_the_last_bits(
    strategy: ms.Strategy, directory: Path, notices: list[str]
) -> None:
    with strategy.replica():
        program = Saving(strategy)
        with torch.no_grad():
            program.model[2].bias -= program.shift * RANK
        manager = program.save(directory)
        with torch.no_grad():
            program.model[0].weight *= 1.0 + RANK * torch.finfo(torch.float64).eps
        manager.save(12)
    assert any("the last bits" in text for text in notices) == (SIZE > 1 and RANK == 0)


def trained_in_run(strategy: ms.Strategy, spoil: Callable[[torch.nn.Module], None]) -> None:
    torch.manual_seed(RANK)
    with strategy.scope():
        model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        context: Any = ms.get_replica_context()
        number = context.replica_id_in_sync_group
        model(torch.full((2, 4), 1.0 + number)).square().mean().backward()
        optimizer.step()

    for number in range(6):
        strategy.run(step)
        if number == 2:
            spoil(model)


@pytest.fixture(params=["k1", "k2", "overlap", "shared"])
def ways(request: pytest.FixtureRequest) -> ms.Strategy:
    if request.param == "overlap":
        one_by_one = ms.CommunicationOptions(overlap=True, bytes_per_pack=1)
        return ms.MultiWorkerMirroredStrategy(communication_options=one_by_one, gradients="sum")
    if request.param == "shared":
        return ms.MultiWorkerMirroredStrategy(gradients="sum", shared_parameters=True)
    devices = [f"cpu:{i}" for i in range(int(request.param[1:]))]
    return ms.MultiWorkerMirroredStrategy(devices=devices, gradients="sum")


def test_run_in_all_ways_is_right(ways: ms.Strategy, notices: list[str]) -> None:
    trained_in_run(ways, lambda model: None)
    assert not drifts(notices)


@several
def test_run_with_two_replicas_of_each_rank(drifting: None, notices: list[str]) -> None:
    def spoil(model: torch.nn.Module) -> None:
        with torch.no_grad():
            model.weight += RANK  # type: ignore[operator]

    trained_in_run(
        ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"], gradients="sum"), spoil
    )
    assert len(drifts(notices)) == (RANK == 0)
