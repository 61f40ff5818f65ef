"""Workers with servers are started again: each goes on with what the servers do not keep, too."""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpistrat as ms
from support.parameter_servers.remote_jobs import strategy_on_servers, workers_of

COMM = MPI.COMM_WORLD
STEPS = 3
pytestmark = pytest.mark.mpi(min_size=2)


class Progress:
    """A program's own object: plain state, and a variable that it writes when it is loaded."""

    def __init__(self, seen: ms.Variable) -> None:
        self.steps, self.seen = 0, seen

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "seen": self.seen.numpy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state.pop("steps")
        self.seen.assign(state.pop("seen"))


class RecordedLinear(torch.nn.Linear):
    note = "new"

    def get_extra_state(self) -> str:
        return self.note

    def set_extra_state(self, state: str) -> None:
        self.note = state


class Training:
    """A worker's, with two optimizers that step in another order than they are saved in."""

    def __init__(self, strategy: Any, folder: Path) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.model = RecordedLinear(2, 1)
            self.late = torch.optim.Adam([self.model.bias], lr=0.5)
            self.early = torch.optim.SGD([self.model.weight], lr=0.25, momentum=0.9)
            self.progress = Progress(ms.Variable(0.0, name="seen"))
        self.schedule = torch.optim.lr_scheduler.StepLR(self.early, 2, gamma=0.5)
        batches = [np.full((COMM.size - 1, 2), number, "float32") for number in range(8)]
        self.data = strategy.experimental_distribute_dataset(batches)
        checkpoint = ms.checkpoint.Checkpoint(
            model=self.model,
            late=self.late,
            early=self.early,
            schedule=self.schedule,
            progress=self.progress,
            data=self.data,
        )
        self.manager = ms.checkpoint.CheckpointManager(checkpoint, folder)

    def step(self, x: Any) -> None:
        def replica(x: Any) -> None:
            self.model.zero_grad()
            self.model(torch.as_tensor(x)).sum().backward()
            self.early.step()
            self.late.step()

        self.strategy.run(replica, args=(x,))
        self.schedule.step()
        self.progress.steps += 1

    def on_servers(self) -> tuple[Any, Any, Any]:
        """A weight, its momentum, and the number of Adam's steps; what is not there is None."""
        early, late = (
            optimizer.state_dict()["state"].get(0, {}) for optimizer in (self.early, self.late)
        )
        weight = self.model.state_dict()["weight"].clone()
        return weight, early.get("momentum_buffer"), late.get("step")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(COMM.bcast(str(tmp_path))) / "checkpoints"


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def draw() -> tuple[float, ...]:
    return random.random(), np.random.random(), torch.rand(()).item()


def made(k: int | None) -> Any:
    make = ms.compat.v1.ParameterServerStrategy
    return strategy_on_servers(lambda: make(num_ps=1, max_staleness=k, gradients="sum"))


@pytest.mark.parametrize("k", [None, 0])
def test_every_worker_goes_on(folder: Path, k: int | None) -> None:
    """Whoever trains first then begins with what was saved, and what it adds stays."""
    saved: Any = None
    seed(8)  # other tests may have left the one that is compared with
    with made(k) as strategy:
        if strategy is not None:
            training = Training(strategy, folder)
            workers, leads = workers_of(strategy), strategy.extended.makes_variables
            for x in itertools.islice(training.data, STEPS):
                training.step(x)
            workers.Barrier()
            saved = training.on_servers()
            if leads:
                training.model.note = "saved"
                training.progress.seen.assign(3.0)
                training.manager.save()
    with made(k) as strategy:
        if strategy is None:
            return
        training = Training(strategy, folder)
        workers, leads = workers_of(strategy), strategy.extended.makes_variables
        seed(7)
        fresh = draw()
        seed(7)
        if not leads and workers.rank == workers.size - 1:
            time.sleep(0.2)  # others have restored, and go on
        path = training.manager.restore_or_initialize()
        training.progress.seen.assign_add(1.0)
        drawn = draw()
        learning_rate = training.early.param_groups[0]["lr"]
        first = np.asarray(next(iter(training.data)))
        workers.Barrier()
        restored = training.on_servers()
        seen = training.progress.seen.numpy()
        workers.Barrier()
        if leads and k is None:
            time.sleep(0.2)  # others are faster
        training.step(np.ones((1, 2), "float32"))
        workers.Barrier()
        now = training.on_servers()
        all_drawn = workers.allgather(drawn)
    # Only here, when nobody waits for another.
    assert str(path).startswith(str(folder))
    assert training.progress.steps == training.schedule.last_epoch == STEPS + 1
    assert learning_rate == 0.25 * 0.5
    assert training.model.note == "saved"
    assert first.max() == STEPS
    assert seen == 3.0 + len(all_drawn)
    assert len(set(all_drawn)) == len(all_drawn)
    assert not set(drawn) & set(fresh)
    weight, momentum, steps = saved
    assert restored[2] == steps
    assert torch.equal(restored[0], weight)
    assert torch.equal(restored[1], momentum)
    gradients = [1.0] * len(all_drawn) if k is None else [float(len(all_drawn))]
    for gradient in gradients:
        momentum = 0.9 * momentum + gradient
        weight = weight - 0.125 * momentum
    assert now[2] == steps + len(gradients)
    torch.testing.assert_close(now[0], weight)


@pytest.mark.parametrize("coordinated", [False, True], ids=["between_graph", "coordinated"])
def test_no_handler_of_preemption(folder: Path, coordinated: bool) -> None:
    """It would wait for a signal that ends the servers."""
    if coordinated and COMM.size < 3:
        return
    cls = ms.ParameterServerStrategy if coordinated else ms.compat.v1.ParameterServerStrategy
    with strategy_on_servers(lambda: cls(num_ps=1)) as strategy:
        if strategy is None:
            return
        with strategy.scope():
            checkpoint = ms.checkpoint.Checkpoint(v=ms.Variable(0.0))
        with pytest.raises(NotImplementedError, match=r"servers.* Call CheckpointManager\.save"):
            ms.experimental.PreemptionCheckpointHandler(None, checkpoint, folder)
        assert not folder.exists()
