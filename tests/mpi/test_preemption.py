"""The end is announced to one rank, at any moment: all ranks save with the same step, and go on from it."""

import contextlib
import gc
import math
import os
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpistrat as ms
from mpistrat.communicators.contract.unchecked import UNCHECKED
from mpistrat.fault_tolerance import PreemptionCheckpointHandler, TerminationConfig
from mpistrat.liveness.ending.job_end import job_end

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
MOST_STEPS = 100_000
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Left(Exception):
    """What the programs here leave by."""


@pytest.fixture(autouse=True)
def _process_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(job_end(), "leaves_together", False)  # the tests go on
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return WORLD.bcast(str(tmp_path))


def leave() -> None:
    raise Left


class Training:
    """A small model; `steps` counts what is done here. Without checkpoints on disk: `saved` has the steps of saves."""

    def __init__(self, strategy: Any, folder: str, **config: Any) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.model = torch.nn.Linear(4, 2)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            checkpoint = ms.checkpoint.Checkpoint(model=self.model, optimizer=self.optimizer)
        self.saved: list[int] = []
        config = {"exit_fn": leave, "save_fn": self.note, "end_time": math.inf, **config}
        self.handler = PreemptionCheckpointHandler(
            strategy.cluster_resolver, checkpoint, folder, TerminationConfig(**config)
        )

    def note(self) -> None:
        self.saved.append(self.handler.total_run_calls)

    def step(self) -> None:
        def replica() -> None:
            self.optimizer.zero_grad()
            self.model(torch.ones(3, 4)).sum().backward()
            self.optimizer.step()

        self.strategy.run(replica)

    def until_it_leaves(self, step: Callable[[], Any] | None = None) -> int:
        """How many steps were taken."""
        with contextlib.suppress(Left):
            for _ in range(MOST_STEPS):
                self.handler.run(step or self.step)
            raise AssertionError(f"it has not left within {MOST_STEPS} steps")
        return self.handler.total_run_calls


def signalled_at_random(seed: int, rank: int) -> threading.Timer | None:
    """Only `rank` gets a signal, within 30 ms."""
    if rank != RANK:
        return None
    seconds = random.Random(seed).uniform(0, 0.03)
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    return timer


STRATEGIES: dict[str, Callable[[], Any]] = {
    "plain": lambda: ms.MultiWorkerMirroredStrategy(gradients="sum"),
    "never checked": lambda: ms.MultiWorkerMirroredStrategy(gradients="sum", check="never"),
    "overlap": lambda: ms.MultiWorkerMirroredStrategy(
        gradients="sum",
        communication_options=ms.CommunicationOptions(overlap=True, bytes_per_pack=1),
    ),
    "virtual replicas": lambda: ms.MultiWorkerMirroredStrategy(
        gradients="sum", devices=["cpu:0", "cpu:1"]
    ),
    "shared parameters": lambda: ms.MultiWorkerMirroredStrategy(
        gradients="sum", shared_parameters=True
    ),
    "deterministic": lambda: ms.MultiWorkerMirroredStrategy(gradients="sum", deterministic=True),
    "over MPI": lambda: ms.MultiWorkerMirroredStrategy(
        gradients="sum", communication_options=ms.CommunicationOptions(implementation="MPI")
    ),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_all_ranks_save_after_the_same_step(name: str, folder: str) -> None:
    for seed in range(3):
        training = Training(STRATEGIES[name](), folder)
        timer = signalled_at_random(seed, rank=seed % SIZE)
        steps = training.until_it_leaves()
        assert training.saved == [steps]
        assert set(WORLD.allgather(steps)) == {steps}
        if timer is not None:
            timer.join()


def test_ranks_that_differ_save_before_they_leave(
    drifting: None, folder: str, notices: list[str]
) -> None:
    training = Training(STRATEGIES["plain"](), folder, save_fn=None)
    training.step()
    with torch.no_grad():
        training.model.bias += RANK
    if RANK == 0:
        os.kill(os.getpid(), signal.SIGUSR1)
    steps = training.until_it_leaves()
    assert Path(folder, f"step-{steps:08}").is_dir()
    marked = [text for text in notices if "has rank 0's values, and is marked" in text]
    assert len(marked) == (SIZE > 1 and RANK == 0)


def test_twenty_signals_at_random_moments(folder: str) -> None:
    strategy = STRATEGIES["plain"]()
    for seed in range(20):
        training = Training(strategy, folder)
        timer = signalled_at_random(100 + seed, rank=random.Random(seed).randrange(SIZE))
        steps = training.until_it_leaves()
        assert WORLD.allgather(training.saved) == [[steps]] * SIZE
        if timer is not None:
            timer.join()


def test_at_most_the_step_under_way_goes_on(folder: str) -> None:
    """A signal in the middle of a step is answered at its end."""
    training = Training(STRATEGIES["plain"](), folder)

    def step() -> None:
        if training.handler.total_run_calls == 3 and RANK == SIZE - 1:
            signal.raise_signal(signal.SIGTERM)
        training.step()

    assert training.until_it_leaves(step) == 4


def test_it_costs_no_message_where_gradients_are_reduced(folder: str) -> None:
    strategy = STRATEGIES["plain"]()
    training = Training(strategy, folder)
    contract = getattr(strategy.extended.communicator, "contract", UNCHECKED)

    def calls_of(step: Callable[[], Any]) -> int:
        before = contract.calls
        for _ in range(5):
            step()
        return contract.calls - before

    calls_of(training.step)
    with_handler = calls_of(lambda: training.handler.run(training.step))
    assert with_handler == calls_of(training.step)
    training.handler.run(lambda: None)  # what rode on the steps since the last call
    assert calls_of(lambda: training.handler.run(lambda: None)) == (5 if SIZE > 1 else 0)


def test_steps_without_a_reduction(folder: str) -> None:
    training = Training(STRATEGIES["plain"](), folder)

    def step() -> None:
        if training.handler.total_run_calls == 2 and RANK == SIZE - 1:
            signal.raise_signal(signal.SIGUSR2)

    assert training.until_it_leaves(step) == 3
    assert training.saved == [3]


def test_some_steps_reduce_and_some_do_not(folder: str) -> None:
    training = Training(STRATEGIES["plain"](), folder)

    def step() -> None:
        if training.handler.total_run_calls % 2:
            training.step()

    timer = signalled_at_random(7, rank=0)
    steps = training.until_it_leaves(step)
    assert WORLD.allgather(training.saved) == [[steps]] * SIZE
    if timer is not None:
        timer.join()


def test_save_checkpoint_if_preempted(folder: str) -> None:
    calls: list[Any] = []
    training = Training(
        STRATEGIES["plain"](), folder, save_fn=lambda *args, **kwargs: calls.append((args, kwargs))
    )
    with contextlib.suppress(Left):
        for step in range(10):
            if step == 3 and RANK == 0:
                signal.raise_signal(signal.SIGTERM)
            training.step()
            training.handler.save_checkpoint_if_preempted(step, why="test")
    assert calls == [((3,), {"why": "test"})]
    assert training.handler.total_run_calls == 4


def test_the_time_limit_is_that_of_the_first_rank(folder: str) -> None:
    """Whatever the other ranks' clocks say."""
    past, later = time.time() - 3600, time.time() + 3600
    training = Training(STRATEGIES["plain"](), folder, end_time=later if RANK == 0 else past)
    for _ in range(3):
        training.handler.run(training.step)
    assert training.saved == []
    training = Training(STRATEGIES["plain"](), folder, end_time=past if RANK == 0 else later)
    assert training.until_it_leaves() == 1
    assert WORLD.allgather(training.saved) == [[1]] * SIZE


def test_the_time_that_a_checkpoint_took_is_left_before_the_limit(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that the program saved by itself."""
    end = time.time() + 3600
    training = Training(STRATEGIES["plain"](), folder, end_time=end, margin=0.0)
    training.handler.run(training.step)
    monkeypatch.setattr(ms.checkpoint.CheckpointManager, "seconds_to_save", 1801.0)
    # The step under way is told of it, and the one after not begun; a lone replica asks at the step's end already.
    assert training.until_it_leaves() == (3 if SIZE > 1 else 2)


@pytest.mark.mpi(min_size=2)
def test_a_limit_that_is_nearer_than_the_margin(
    folder: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is said, and most of the time is for training: the margin shrinks to what checkpoints take."""
    Training(STRATEGIES["plain"](), folder).step()  # which imports a lot
    capfd.readouterr()
    done = 0
    for start in range(2):
        end = time.time() + 1.5
        training = Training(STRATEGIES["plain"](), folder, end_time=end, save_fn=None)
        steps = training.until_it_leaves()
        assert steps - done > 5
        done = steps
        written = capfd.readouterr().err
        assert ("the time limit is near" in written) == (RANK == 0), written
        assert ("goes on from" in written) == (RANK == 0 and start == 1)


def test_a_grace_period_begins_and_ends_on_all_ranks_at_once(folder: str) -> None:
    training = Training(STRATEGIES["plain"](), folder, grace_period=0.3)
    timer = signalled_at_random(3, rank=SIZE - 1)
    steps = training.until_it_leaves()
    assert len(training.saved) == 2
    assert training.saved[0] < training.saved[1] == steps
    assert WORLD.allgather(training.saved) == [training.saved] * SIZE
    if timer is not None:
        timer.join()


def test_a_watcher_on_one_rank(folder: str) -> None:
    config = {"termination_watcher_fn": lambda: True} if RANK == SIZE - 1 else {}
    training = Training(STRATEGIES["plain"](), folder, **config)
    steps = training.until_it_leaves()
    assert set(WORLD.allgather(steps)) == {steps}


def test_signals_before_the_first_step_twice_and_after_the_end(folder: str) -> None:
    training = Training(STRATEGIES["plain"](), folder)
    if RANK == 0:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
    assert training.until_it_leaves() == 1
    signal.raise_signal(signal.SIGTERM)
    training.handler.run(training.step)  # exit_fn has not ended this program
    training.handler.save_checkpoint_if_preempted()
    assert training.saved == [1]
    assert training.handler.total_run_calls == 3


def test_an_error_of_a_step_does_not_count(folder: str) -> None:
    training = Training(STRATEGIES["plain"](), folder)

    def fails() -> None:
        training.step()
        raise KeyError("this one")

    with pytest.raises(KeyError, match="this one"):
        training.handler.run(fails)
    assert training.handler.total_run_calls == 0


def test_training_goes_on_with_the_same_bits(folder: str) -> None:
    """Interrupted after each few steps, it comes to what it comes to undisturbed; batches are taken in a `for`."""
    steps, batch = 12, 4 * SIZE

    def train(where: str, interrupted_at: int | None) -> Any:
        strategy = ms.MultiWorkerMirroredStrategy(gradients="sum")
        torch.manual_seed(7)
        with strategy.scope():
            model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.3))
            optimizer = torch.optim.Adam(model.parameters())
            data = ms.input.BatchedDataset(
                np.random.default_rng(0).random((steps * batch, 3), np.float32), batch, shuffle=True
            )
            distributed = strategy.experimental_distribute_dataset(data)
            checkpoint = ms.checkpoint.Checkpoint(
                model=model, optimizer=optimizer, data=distributed
            )
        handler = PreemptionCheckpointHandler(
            strategy.cluster_resolver,
            checkpoint,
            where,
            TerminationConfig(exit_fn=leave, end_time=math.inf),
        )

        def step(x: Any) -> None:
            optimizer.zero_grad()
            model(torch.as_tensor(x)).square().sum().backward()
            optimizer.step()

        for x in distributed:
            if handler.total_run_calls == interrupted_at and RANK == SIZE - 1:
                signal.raise_signal(signal.SIGUSR1)
            handler.run(strategy.run, step, args=(x,))
        assert handler.total_run_calls == steps
        return [parameter.detach().clone() for parameter in model.parameters()]

    undisturbed = train(f"{folder}/undisturbed", None)
    for interruption in (0, 4, 5, 9):
        with pytest.raises(Left):
            train(f"{folder}/interrupted", interruption)
    resumed = train(f"{folder}/interrupted", None)
    assert all(torch.equal(a, b) for a, b in zip(undisturbed, resumed, strict=True))


class Loop(Training):
    """A loop inside `replica()`, of `batches` of 4 examples, whose checkpoint has the loader."""

    def __init__(self, strategy: Any, folder: str, batches: int) -> None:
        super().__init__(strategy, folder)
        self.loader = strategy.experimental_distribute_dataset([np.ones((4, 4))] * batches)
        checkpoint = ms.checkpoint.Checkpoint(
            model=self.model, optimizer=self.optimizer, loader=self.loader
        )
        config = TerminationConfig(exit_fn=leave, save_fn=self.note, end_time=math.inf)
        self.handler = PreemptionCheckpointHandler(None, checkpoint, folder, config)

    def train(self, per_step: int = 1, explicit: bool = False, most: int = MOST_STEPS) -> None:
        """An epoch, whose steps are of `per_step` batches each; left after `most` batches."""
        for i, x in enumerate(self.loader, start=1):
            self.model(torch.as_tensor(x, dtype=torch.float32)).sum().backward()
            if i % per_step == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
                if explicit:
                    self.handler.save_checkpoint_if_preempted()
            if i == most:
                break


def test_steps_that_a_loader_counts(folder: str) -> None:
    """Inside `replica()`, where the loop asks for the next batch: the batches of one step count once."""
    with ms.MultiWorkerMirroredStrategy().replica() as context:
        loop = Loop(context.strategy, folder, batches=6)
        loop.train()
        assert loop.handler.total_run_calls == 6
        loop.train(per_step=3)
        assert loop.handler.total_run_calls == 8
        loop.train(most=2)  # the second one ends when the next epoch begins
        assert loop.handler.total_run_calls == 9
        loop.train()
        assert loop.handler.total_run_calls == 16
        for _ in context.strategy.experimental_distribute_dataset([np.ones((4, 4))] * 3):
            pass  # an evaluation
        assert loop.handler.total_run_calls == 16
        loop.train(explicit=True)  # from the first call on, the program says where steps end
        assert loop.handler.total_run_calls == 22


def test_a_loop_leaves_where_it_asks_for_a_batch(folder: str) -> None:
    with ms.MultiWorkerMirroredStrategy().replica() as context:
        loop = Loop(context.strategy, folder, batches=6)
        loop.handler = weakref.proxy(loop.handler)  # the program need not keep it
        gc.collect()
        loop.train(per_step=2)
        if RANK == SIZE - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Left):
            loop.train(per_step=2)
        assert loop.saved == [4]  # never with gradients that wait for an optimizer
        assert loop.loader.state_dict()["steps"] == 2


def test_a_loader_has_one_handler(folder: str) -> None:
    """The first one would save alone, and end the program. A refused one has made nothing."""
    with ms.MultiWorkerMirroredStrategy().replica() as context:
        loop = Loop(context.strategy, folder, batches=3)
        checkpoint = ms.checkpoint.Checkpoint(model=loop.model, loader=iter(loop.loader))
        with pytest.raises(ValueError, match="Make one handler for each dataset"):
            PreemptionCheckpointHandler(None, checkpoint, f"{folder}/other")
        assert not Path(folder, "other").exists()
        loop.train()
        assert loop.handler.total_run_calls == 3
