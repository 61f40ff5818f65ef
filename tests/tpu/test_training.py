"""Training under TPUStrategy is training: the same parameters as on the CPU, with ranks, with cores, and with both."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import mpistrat as ms
from mpistrat import xla
from support.xla.child_programs import answer
from support.xla.trained_models import Training, batches

pytestmark = pytest.mark.filterwarnings("ignore:each of the .* ranks reads all batches")

TESTS = str(Path(__file__).parents[1])
# What a child trains, on as many virtual cores as it has. It prints all that it ends with.
PROGRAM = """
import json, sys
sys.path.insert(0, {tests!r})
import mpistrat as ms
from mpistrat import xla
from support.xla.trained_models import Training
training = Training(ms.TPUStrategy(gradients="sum"), "{kind}")
replicas = training.strategy.num_replicas_in_sync
losses = training.run()
before = xla.start().graphs.num_compilations()
training.run()
again = xla.start().graphs.num_compilations() - before
print(json.dumps([replicas, losses, training.state(), again]))
"""
KINDS = ["adam", "momentum", "sgd", "synchronized"]


def on_the_cpu(kind: str, strategy: ms.Strategy) -> tuple[list[float], list[list[float]]]:
    """The losses, and what training ends with."""
    training = Training(strategy, kind)
    losses = training.run()
    training.run()
    return losses, training.state()


def of_one_rank(replicas: int, comm: Any = None) -> ms.Strategy:
    devices = [f"cpu:{i}" for i in range(replicas)]
    return ms.MirroredStrategy(devices, comm=comm, gradients="sum")


def alone() -> Any:
    from mpi4py import MPI

    return MPI.COMM_SELF


def assert_close(left: list[list[float]], right: list[list[float]]) -> None:
    for value, other in zip(left, right, strict=True):
        assert value == pytest.approx(other, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "cores"),
    [("adam", 1), ("adam", 2), ("momentum", 4), ("sgd", 2), ("synchronized", 2)],
)
def test_cores_of_a_rank_train_as_replicas_on_the_cpu(kind: str, cores: int) -> None:
    replicas, losses, state, again = answer(
        PROGRAM.format(kind=kind, tests=TESTS), CPU_NUM_DEVICES=str(cores)
    )
    assert replicas == cores
    expected_losses, expected_state = on_the_cpu(kind, of_one_rank(cores))
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert_close(state, expected_state)
    assert again == 0


@pytest.mark.mpi
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_train_as_replicas_on_the_cpu(kind: str) -> None:
    training = Training(ms.TPUStrategy(gradients="sum"), kind)
    losses = training.run()
    before = xla.start().graphs.num_compilations()
    training.run()
    assert xla.start().graphs.num_compilations() == before
    communicator = training.strategy.extended.communicator
    expected_losses, expected_state = on_the_cpu(kind, of_one_rank(communicator.size, alone()))
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert_close(training.state(), expected_state)
    states = communicator.all_gather_object(training.state())
    assert all(state == states[0] for state in states)


@pytest.mark.mpi
def test_plain_descent_is_one_graph_of_a_rank_alone() -> None:
    strategy = ms.TPUStrategy(gradients="sum", comm=alone())
    training = Training(strategy, "sgd")
    device = strategy.extended.worker_devices[0]
    # Of a size that no other test here has: what was compiled is not compiled again.
    on_device = [tuple(tensor.to(device) for tensor in batch) for batch in batches(3, examples=11)]
    before = xla.start().graphs.num_compilations()
    for batch in on_device:
        strategy.run(training.step, args=batch)
    assert xla.start().graphs.num_compilations() - before == 1
    assert strategy.extended.explain().splitlines()[-1] == (
        "Training.step: 1 graph for float32[11,4], float32[11,3]"
    )


@pytest.mark.mpi
def test_what_keeps_changing_nothing_is_told_of_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """A batch norm counts its batches: 0 and 1 were parts of the graph, and a third was compiled."""
    Training(ms.TPUStrategy(gradients="sum"), "adam").run()
    assert "compiled" not in capfd.readouterr().err


@pytest.mark.mpi
def test_a_new_shape_is_told_once(capfd: pytest.CaptureFixture[str]) -> None:
    strategy = ms.TPUStrategy()

    def double(value: torch.Tensor) -> torch.Tensor:
        return value * 2

    device = strategy.extended.worker_devices[0]
    for length in (3, 3, 5, 5, 3):
        strategy.run(double, args=(torch.ones(length, device=device),))
    lines = [line for line in capfd.readouterr().err.splitlines() if "compiled" in line]
    assert len(lines) == 1
    assert "argument array 0 is float32[5], and was float32[3]" in lines[0]


@pytest.mark.mpi
def test_steps_of_one_name_are_told_apart(capfd: pytest.CaptureFixture[str]) -> None:
    strategy = ms.TPUStrategy()
    value = torch.ones(2, device=strategy.extended.worker_devices[0])
    for step in (lambda x: x + 1, lambda x: x + 2.5, lambda x: x * x, lambda x: x - x * x):
        strategy.run(step, args=(value,))
    assert "compiled" not in capfd.readouterr().err


@pytest.mark.mpi
def test_steps_that_another_strategy_had_compiled_are_told(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def add(number: float, value: torch.Tensor) -> torch.Tensor:
        return value + number

    explained = []
    for _ in range(2):
        strategy = ms.TPUStrategy()
        device = strategy.extended.worker_devices[0]
        for length in (7, 9, 7):
            step = functools.partial(add, 2.75)  # another object, the same step
            strategy.run(step, args=(torch.ones(length, device=device),))
        explained.append(strategy.extended.compilations.explain().splitlines())
    name = add.__qualname__
    assert explained == [
        [f"{name}: 1 graph for float32[7]", f"{name}: 1 graph for float32[9]"],
        [f"{name}: no graph that was not compiled before for float32[{n}]" for n in (7, 9)],
    ]
    lines = [line for line in capfd.readouterr().err.splitlines() if "compiled" in line]
    assert len(lines) == 1  # of the first strategy's second shape


@pytest.mark.mpi
def test_two_backwards_a_clipped_norm_and_a_schedule_in_a_step() -> None:
    def train(strategy: ms.Strategy, schedule_inside: bool) -> list[list[float]]:
        training = Training(strategy, "momentum")
        schedule = torch.optim.lr_scheduler.StepLR(training.optimizer, 1, 0.5)
        scale = 2 * strategy.num_replicas_in_sync

        def step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
            training.optimizer.zero_grad()
            with strategy.no_sync():
                (((training.model(inputs) - targets) ** 2).mean() / scale).backward()
            (((training.model(inputs) - targets) ** 2).mean() / scale).backward()
            torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.5)
            training.optimizer.step()
            if schedule_inside:
                schedule.step()

        for batch in strategy.experimental_distribute_dataset(batches()):
            strategy.run(step, args=batch)
            if not schedule_inside:  # replicas that are threads of one rank refuse it
                schedule.step()
        return training.state()

    ours = ms.TPUStrategy(gradients="sum")
    expected = train(of_one_rank(ours.num_replicas_in_sync, alone()), schedule_inside=False)
    assert_close(train(ours, schedule_inside=True), expected)


@pytest.mark.mpi
def test_the_next_batch_is_on_its_way_when_a_step_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = ms.TPUStrategy()
    runtime, copied = xla.start(), []
    put = runtime.put

    def recorded(tensors: Any, device: Any) -> list[Any]:
        copied.extend(float(tensor[0]) for tensor in tensors)
        return put(tensors, device)

    monkeypatch.setattr(runtime, "put", recorded)
    data = [torch.full((strategy.num_replicas_in_sync,), float(k)) for k in range(4)]
    copied_by_step = []
    for _ in strategy.experimental_distribute_dataset(data):
        copied_by_step.append([*copied])
    assert copied_by_step == [[0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]]


@pytest.mark.mpi
def test_activations_may_be_computed_again() -> None:
    from torch_xla.utils.checkpoint import checkpoint

    def train(training: Training) -> list[list[float]]:
        strategy = training.strategy
        on_xla = isinstance(strategy, ms.TPUStrategy)

        def step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
            training.optimizer.zero_grad()
            inputs = inputs.clone().requires_grad_()
            outputs = checkpoint(training.model, inputs) if on_xla else training.model(inputs)
            (((outputs - targets) ** 2).mean() / strategy.num_replicas_in_sync).backward()
            training.optimizer.step()

        for batch in strategy.experimental_distribute_dataset(batches()):
            strategy.run(step, args=batch)
        return training.state()

    ours = Training(ms.TPUStrategy(gradients="sum"), "momentum")
    alike = of_one_rank(ours.strategy.num_replicas_in_sync, alone())
    assert_close(train(ours), train(Training(alike, "momentum")))
