"""How the host's time of a training step is spent, with mpistrat and in plain PyTorch: real timers around its parts.

The device has nothing to do when a step begins, so the host waits for it nowhere but where the step itself does.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from mpistrat.pytorch import hooks
from mpistrat.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from mpistrat.tools.bench.rounds import all_ranks
from mpistrat.tools.bench.training import STEPS_OF_TRIALS
from mpistrat.tools.bench.work import Work

# What is in none of the others: of a step with mpistrat, `strategy.run` itself.
REST = "rest"
PARTS = (
    "input",
    "forward",
    "backward by torch",
    "backward by mpistrat",
    "reduction",
    "optimizer",
    REST,
)
Tensors = tuple[torch.Tensor, ...]


class HostTimes:
    """Adds up the host's seconds in each part of steps. A part inside another counts for itself alone."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._open = [REST]
        self._since = 0.0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        self._since = time.perf_counter()
        yield
        self._end_of_piece()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._end_of_piece()
        self._open.append(name)
        try:
            yield
        finally:
            self._end_of_piece()
            self._open.pop()

    def _end_of_piece(self) -> None:
        now = time.perf_counter()
        self.seconds[self._open[-1]] += now - self._since
        self._since = now

    @contextlib.contextmanager
    def around(self, owner: Any, name: str, part: str) -> Iterator[None]:
        """Inside, calls of `owner.name` by the step are a part of it."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not _is_of_the_step():
                return original(*args, **kwargs)
            with self.part(part):
                return original(*args, **kwargs)

        setattr(owner, name, call)
        try:
            yield
        finally:
            setattr(owner, name, original)


def _is_of_the_step() -> bool:
    """Whether this thread is the program's, or one of torch's that compute gradients while the program's waits."""
    thread = threading.current_thread()
    return thread is threading.main_thread() or isinstance(thread, threading._DummyThread)


class _Repeated(Dataset[Tensors]):
    """The examples of one batch, as often as `batches` batches need them."""

    def __init__(self, examples: Tensors, batches: int) -> None:
        self._examples = examples
        self._batches = batches

    def __len__(self) -> int:
        return len(self._examples[0]) * self._batches

    def __getitem__(self, index: int) -> Tensors:
        return tuple(part[index % len(part)] for part in self._examples)


def host_ms(
    work: Work, steps: int, num_rounds: int, wait: Callable[[], None]
) -> dict[str, dict[str, float]]:
    """Milliseconds of this rank's host for a step with mpistrat and in plain PyTorch. Called by: every rank.

    "host ms" is the step; it is also given by part. Of the rounds the one with the median time counts.
    Args: wait: returns when the device has nothing to do.
    """
    # mpistrat first: a strategy replaces functions of torch, in whose place plain PyTorch then is measured, too.
    batches = STEPS_OF_TRIALS + steps * num_rounds
    return {
        "mpistrat": _measure(_ours(work, batches), steps, num_rounds, wait),
        "plain PyTorch": _measure(_plain(work, batches), steps, num_rounds, wait),
    }


Run = Callable[..., Any]  # what runs a step
Trained = tuple[torch.nn.Module, torch.optim.Optimizer]
Contestant = tuple[Iterator[Tensors], Trained, Run]


def _plain(work: Work, batches: int) -> Contestant:
    trained = work.build()
    examples = work.model.synthetic_batch(work.examples, seed=0)
    loader = DataLoader(_Repeated(examples, batches), work.examples)
    on_device = (tuple(part.to(work.device) for part in batch) for batch in loader)
    return on_device, trained, lambda step, batch: step(batch)


def _ours(work: Work, batches: int) -> Contestant:
    strategy = MultiWorkerMirroredStrategy(devices=[work.device], gradients="mean")
    with strategy.scope():
        trained = work.build()
    of_all_ranks = work.examples * all_ranks().size
    examples = work.model.synthetic_batch(of_all_ranks, seed=0)
    loader = DataLoader(_Repeated(examples, batches), of_all_ranks)
    dataset = strategy.experimental_distribute_dataset(loader)
    return iter(dataset), trained, lambda step, batch: strategy.run(step, args=(batch,))


def _measure(
    contestant: Contestant, steps: int, num_rounds: int, wait: Callable[[], None]
) -> dict[str, float]:
    batches, (module, optimizer), run = contestant
    times = HostTimes()
    # A strategy of one replica leaves it as it is.
    is_torchs = torch.autograd.backward is hooks.original_backward
    backward = "backward by torch" if is_torchs else "backward by mpistrat"

    def step(batch: Tensors) -> None:
        inputs, targets = batch
        with times.part("optimizer"):
            optimizer.zero_grad()
        with times.part("forward"):
            loss = functional.cross_entropy(module(inputs), targets)
        with times.part(backward):
            loss.backward()
        with times.part("optimizer"):
            optimizer.step()

    def host_seconds() -> float:
        wait()
        began = time.perf_counter()
        with times.step():
            with times.part("input"):
                batch = next(batches)
            run(step, batch)
        return time.perf_counter() - began

    rounds = []
    with (
        times.around(hooks, "original_backward", "backward by torch"),
        times.around(type(all_ranks()), "all_reduce", "reduction"),
    ):
        for _ in range(STEPS_OF_TRIALS):
            host_seconds()
        for _ in range(num_rounds):
            times.seconds = dict.fromkeys(PARTS, 0.0)
            whole = sum(host_seconds() for _ in range(steps))
            seconds = {"host ms": whole, **times.seconds}
            per_step = {name: 1000 * value / steps for name, value in seconds.items()}
            rounds.append(per_step)
    rounds.sort(key=lambda row: row["host ms"])
    return rounds[len(rounds) // 2]
