"""Trains on the CPU and on an accelerator, each rank on one of its own, and compares what comes out.

Usage: simulated_accelerator.py FOLDER, which all ranks see. Rank 0 prints "same NAME" for each training. The
accelerator is that of `support.accelerator`. The simulated one computes as the CPU does, to the bit, and draws its
numbers; on another one nothing is dropped out, and results are compared within `OTHERS_TOLERANCE`.
"""

import functools
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional

import mpistrat as ms
from mpistrat.communicators.transports.accelerator import gpu_transports

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS), str(TESTS.parent / "scripts")]

import train_digits  # noqa: E402

from support import accelerator  # noqa: E402

FOLDER = Path(sys.argv[1])
EXAMPLES, STEPS = 16, 5  # of a batch of all replicas; of a training
SIM = accelerator.load()
OTHERS_TOLERANCE = 2e-3
DROPPED = 0.1
if accelerator.left_out(
    "dropout, equal bits",
    "other devices draw and round otherwise",
    says_so=MPI.COMM_WORLD.rank == 0,
):
    DROPPED = 0.0
# Four processes would import torch to find out that MPI does not take the simulated device's memory.
gpu_transports.why_not_proven = lambda *args: "not tried"

Tensors = dict[str, torch.Tensor]


def cnn(dropped: float = DROPPED) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropped),
        nn.Linear(32, 10),
    )


class Training:
    """Of a model on digits, on "cpu" or on the accelerator.

    Args: batches_ahead: so many are on their way to the device while a step is computed.
    """

    def __init__(
        self,
        kind: str,
        model: Callable[[], nn.Module],
        optimizer: Callable[..., torch.optim.Optimizer],
        *,
        mixed: bool = False,
        batches_ahead: int = 1,
        **options: Any,
    ) -> None:
        self.kind, self.mixed = kind, mixed
        devices = ["cpu:0"] if kind == "cpu" else None
        self.strategy = ms.MultiWorkerMirroredStrategy(devices=devices, gradients="sum", **options)
        torch.manual_seed(1)
        with self.strategy.scope():
            self.model = model()
            self.optimizer = optimizer(self.model.parameters())
        torch.manual_seed(100 + MPI.COMM_WORLD.rank)  # for what each drops out
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.01, total_steps=100)
        self.scaler = torch.amp.GradScaler(kind, init_scale=1024.0, enabled=mixed)
        self.data = self.strategy.experimental_distribute_dataset(
            train_digits.load_data(EXAMPLES, 0)[0],
            ms.InputOptions(experimental_per_replica_buffer_size=batches_ahead),
        )
        self.checkpoint = ms.checkpoint.Checkpoint(
            model=self.model,
            optimizer=self.optimizer,
            schedule=self.schedule,
            data=self.data,
            scaler=self.scaler,
        )
        self.batches: Iterator[Any] | None = None
        self.losses: list[float] = []
        assert {p.device.type for p in self.model.parameters()} == {kind}

    def step(self, batch: Any) -> torch.Tensor:
        images, labels = batch
        assert images.device.type == labels.device.type == self.kind
        with torch.autocast(self.kind, torch.bfloat16, enabled=self.mixed):
            logits = self.model(images)
        losses = functional.cross_entropy(logits.float(), labels, reduction="none")
        loss = ms.compute_average_loss(losses, global_batch_size=EXAMPLES)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        return loss.detach()

    def train(self, steps: int, run: Callable[..., Any] | None = None) -> "Training":
        run = run or (lambda *args, **how: self.strategy.run(*args, **how))
        self.batches = self.batches or iter(self.data)  # goes on where a checkpoint was saved
        for batch in itertools.islice(self.batches, steps):
            loss = run(self.step, args=(batch,))
            self.losses.append(float(self.strategy.reduce("sum", loss, axis=None)))
        return self

    def results(self) -> Tensors:
        """On the host."""
        state = {name: value.detach().cpu() for name, value in self.model.state_dict().items()}
        return {**state, "losses": torch.tensor(self.losses)}


def sgd(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def trained(*args: Any, **how: Any) -> Callable[[str], Tensors]:
    return lambda kind: Training(kind, *args, **how).train(STEPS).results()


def through_a_checkpoint(kind: str) -> Tensors:
    """Saved half way; another training goes on from there."""
    first = Training(kind, cnn, torch.optim.Adam).train(2)
    path = ms.checkpoint.CheckpointManager(first.checkpoint, FOLDER / f"{kind}-saved").save(2)
    first.train(STEPS - 2)
    second = Training(kind, cnn, torch.optim.Adam)
    ms.checkpoint.CheckpointManager(second.checkpoint, FOLDER / f"{kind}-saved").restore(path)
    second.losses = first.losses[:2]
    second.train(STEPS - 2)
    expect_same("restored", second.results(), first.results())
    return second.results()


def through_a_preemption(kind: str) -> Tensors:
    """The last rank is told to end after two steps; a second program goes on from what was written then."""

    class Left(Exception):
        pass

    def leave() -> None:
        raise Left

    losses: list[float] = []
    for is_told in (True, False):
        training = Training(kind, cnn, torch.optim.Adam)
        handler = ms.experimental.PreemptionCheckpointHandler(
            training.strategy.cluster_resolver,
            training.checkpoint,
            FOLDER / f"{kind}-preempted",
            ms.experimental.TerminationConfig(exit_fn=leave),
        )
        training.losses = losses
        try:
            while handler.total_run_calls < STEPS:
                if (
                    is_told
                    and handler.total_run_calls == 2
                    and MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1
                ):
                    os.kill(os.getpid(), signal.SIGTERM)
                training.train(1, functools.partial(handler.run, training.strategy.run))
        except Left:
            assert is_told
        losses = losses[: handler.total_run_calls]
    return training.results()


def host_waits(hidden: int) -> tuple[bool, list[str]]:
    """Whether collectives are ordered by streams; and how the host has waited between backward() and the optimizer."""
    strategy = ms.MultiWorkerMirroredStrategy(gradients="mean")
    with strategy.scope():
        model = nn.Sequential(nn.Linear(64, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, waits = torch.randn(8, 64, device=accelerator.KIND), []

    def step() -> None:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        SIM.host_waits()
        with accelerator.no_host_waits(SIM, asked_for=not accelerator.SIMULATED):
            loss.backward()
        waits.extend(kind for kind in SIM.host_waits() if kind != "query")  # which returns at once
        optimizer.step()

    for _ in range(6):
        strategy.run(step)
    return strategy.extended.communicator.ordered_by_streams, waits


def expect_same(name: str, ours: Tensors, expected: Tensors) -> None:
    """To the bit, where sums have one order only. Raises: AssertionError, on every rank that sees a difference."""
    exactly = MPI.COMM_WORLD.size == 2 or name == "deterministic"
    how = {"rtol": 0.0, "atol": 0.0} if exactly else {"rtol": 1e-4, "atol": 1e-5}
    if not accelerator.SIMULATED:
        how = {"rtol": OTHERS_TOLERANCE, "atol": OTHERS_TOLERANCE}
    for key, value in expected.items():
        torch.testing.assert_close(
            ours[key], value, **how, msg=functools.partial("{}, {}: {}".format, name, key)
        )


CASES = {
    "digits": trained(train_digits.build_model, torch.optim.Adam),
    "batch norm": trained(cnn, sgd),
    # With bfloat16, devices round once less behind a dropout than the CPU does.
    "mixed precision": trained(lambda: cnn(dropped=0.0), sgd, mixed=True),
    "deterministic": trained(cnn, torch.optim.Adam, deterministic=True),
    "input prefetch": trained(cnn, torch.optim.Adam, batches_ahead=3),
    "checkpoint": through_a_checkpoint,
    "preemption": through_a_preemption,
}


def main() -> None:
    rank = MPI.COMM_WORLD.rank
    way = ms.MultiWorkerMirroredStrategy().extended.explain()
    if rank == 0:
        print(way)
    for name, case in CASES.items():
        expect_same(name, case(accelerator.KIND), case("cpu"))
        violations = SIM.violations()
        assert not violations, (name, violations[:3])
        if rank == 0:
            print("same", name, flush=True)
    for hidden in (4, 400, 10_000):
        by_streams, waits = host_waits(hidden)
        assert not (by_streams and waits), waits
        if rank == 0 and by_streams:
            print(f"no wait of the host, with {hidden} hidden", flush=True)


if __name__ == "__main__":
    main()
