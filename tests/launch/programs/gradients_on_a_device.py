"""Gradients on accelerators: those of a process alone on the CPU, in little memory, and nobody waits.

Usage: gradients_on_a_device.py [CHECK…] | stall; rank 0 prints the name of each check that holds. The accelerator is
that of `support.accelerator`.
"""

import copy
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.utils.checkpoint import checkpoint

import mpistrat as ms

TESTS = Path(__file__).parents[2]
sys.path.insert(0, str(TESTS))

from support import accelerator  # noqa: E402
from support.trips import Figures, least  # noqa: E402

SIM = accelerator.load()
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
KNOWN = 3  # steps after which gradients leave early
BATCH = 4  # of each rank
MOST = Figures(60, 21)  # of the trip of eight gradients, each in a bucket of its own
MOST_MEMORY = 1.25  # times the gradients
_SOME = ms.MultiWorkerMirroredStrategy(gradients="sum").extended
DEVICE = torch.device(_SOME.worker_devices[0])
NATIVELY = _SOME.communicator.ordered_by_streams  # else the ranks share a device


def strategy_with(**options: Any) -> ms.Strategy:
    options = ms.CommunicationOptions(**options)
    return ms.MultiWorkerMirroredStrategy(communication_options=options, gradients="sum")


def sum_of_squares(model: nn.Module, x: torch.Tensor, seed: int) -> torch.Tensor:
    return model(x).square().mean()


class Pair:
    """A model on the ranks' devices, and a copy of it on the CPU, which takes the examples of all ranks."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        loss: Callable[[nn.Module, torch.Tensor, int], torch.Tensor] = sum_of_squares,
        shape: tuple[int, ...] = (6,),
        **options: Any,
    ) -> None:
        self.strategy, self.loss, self.shape = strategy_with(**options), loss, shape
        torch.manual_seed(0)
        with self.strategy.scope():
            self.model = make()
        assert {p.device for p in self.model.parameters()} == {DEVICE}
        self.alone = copy.deepcopy(self.model).to("cpu")
        self.optimizers = [
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            for model in (self.model, self.alone)
        ]
        self.random = torch.Generator().manual_seed(1)

    def inputs(self) -> torch.Tensor:
        """Of all ranks."""
        if self.shape == ():
            return torch.randint(0, 20, (SIZE, BATCH), generator=self.random)
        return torch.randn(SIZE, BATCH, *self.shape, generator=self.random)

    def backward(self, inputs: torch.Tensor) -> None:
        self.loss(self.model, inputs[RANK].to(DEVICE), RANK).backward()

    def step(self, before_step: Callable[[nn.Module], Any] = lambda _: None) -> None:
        inputs = self.inputs()

        def step() -> None:
            self.optimizers[0].zero_grad()
            self.backward(inputs)
            before_step(self.model)
            self.optimizers[0].step()

        self.strategy.run(step)
        self.optimizers[1].zero_grad()
        for rank in range(SIZE):
            self.loss(self.alone, inputs[rank], rank).backward()
        before_step(self.alone)
        self.optimizers[1].step()

    def check(self, **tolerance: float) -> None:
        for (name, mine), other in zip(
            self.model.named_parameters(), self.alone.parameters(), strict=True
        ):
            assert (mine.grad is None) == (other.grad is None), name
            if mine.grad is not None:
                assert mine.grad.layout == other.grad.layout, name
                both = mine.grad.cpu().to_dense(), other.grad.to_dense()
                torch.testing.assert_close(
                    *both, msg=lambda text, name=name: f"{name}: {text}", **tolerance
                )
            torch.testing.assert_close(mine.cpu(), other, **tolerance)

    def train(self, steps: int = KNOWN + 3, **tolerance: float) -> None:
        for _ in range(steps):
            self.step()
            self.check(**tolerance)
        assert "while backward() runs" in self.strategy.extended.explain()


def layers(count: int = 4, width: int = 6, **kinds: Any) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width, **kinds) for _ in range(count)))


def several_models() -> None:
    for bytes_per_pack in (0, 1, 200):
        Pair(layers, bytes_per_pack=bytes_per_pack).train()
    convolutions = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), nn.ReLU(), nn.Conv2d(4, 2, 3)
    )
    Pair(convolutions, shape=(3, 8, 8), bytes_per_pack=1).train()


def unused_parameters() -> None:
    """In each step another layer on each rank."""
    number = [0]

    def loss(model: nn.Module, x: torch.Tensor, rank: int) -> torch.Tensor:
        used = [
            layer
            for i, layer in enumerate(model)
            if number[0] <= KNOWN or (i + rank + number[0]) % 3
        ]
        for layer in used:
            x = layer(x)
        return x.square().mean()

    pair = Pair(layers, loss, bytes_per_pack=100)
    for number[0] in range(KNOWN + 5):
        pair.step()
        pair.check()


def checkpoints_inside() -> None:
    """One layer three times, each recomputed in a backward of its own: its gradient comes in three parts."""

    def loss(model: nn.Module, x: torch.Tensor, rank: int) -> torch.Tensor:
        x = x.requires_grad_()
        for _ in range(3):
            x = checkpoint(model[0], x, use_reentrant=True)
        return model[1](x).square().mean()

    Pair(lambda: layers(2), loss, bytes_per_pack=1).train()


def accumulation() -> None:
    """Twice with, once without synchronization."""
    pair = Pair(layers, bytes_per_pack=200)
    for _ in range(KNOWN + 3):
        three = [pair.inputs() for _ in range(4)]

        def step(three: list[torch.Tensor] = three) -> None:
            pair.optimizers[0].zero_grad()
            pair.backward(three[0])
            pair.backward(three[1])
            with pair.strategy.no_sync():
                pair.backward(three[2])
            pair.backward(three[3])
            pair.optimizers[0].step()

        pair.strategy.run(step)
        pair.optimizers[1].zero_grad()
        for inputs in three:
            for rank in range(SIZE):
                pair.loss(pair.alone, inputs[rank], rank).backward()
        pair.optimizers[1].step()
        pair.check(rtol=1e-5, atol=1e-5)


def mixed_dtypes() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = layers(2, dtype=torch.float64), layers(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x.double()).float())

    for bytes_per_pack in (0, 100):
        Pair(Both, bytes_per_pack=bytes_per_pack).train()


def sparse_gradients() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(20, 6, sparse=True), nn.Linear(6, 6))

    pair = Pair(make, shape=())
    for optimizer in pair.optimizers:
        optimizer.param_groups[0]["momentum"] = 0.0
    pair.train()


def clipping_and_scaling() -> None:
    """A `GradScaler` that finds infinities in one step, and clipping by norm."""
    scalers = {
        kind: torch.amp.GradScaler(kind, init_scale=4.0, growth_interval=2)
        for kind in (accelerator.KIND, "cpu")
    }
    number = [0]

    def loss(model: nn.Module, x: torch.Tensor, rank: int) -> torch.Tensor:
        infinite = float("inf") if (number[0], rank) == (KNOWN + 1, 0) else 1.0
        return scalers[x.device.type].scale(model(x).square().sum() * infinite)

    pair = Pair(layers, loss, bytes_per_pack=200)
    for number[0] in range(KNOWN + 4):
        inputs = pair.inputs()

        def update(model: nn.Module, optimizer: Any, kind: str) -> None:
            scalers[kind].unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scalers[kind].step(optimizer)
            scalers[kind].update()

        def step(inputs: torch.Tensor = inputs) -> None:
            pair.optimizers[0].zero_grad()
            pair.backward(inputs)
            update(pair.model, pair.optimizers[0], accelerator.KIND)

        pair.strategy.run(step)
        pair.optimizers[1].zero_grad()
        for rank in range(SIZE):
            pair.loss(pair.alone, inputs[rank], rank).backward()
        update(pair.alone, pair.optimizers[1], "cpu")
        for mine, other in zip(pair.model.parameters(), pair.alone.parameters(), strict=True):
            torch.testing.assert_close(mine.cpu(), other)
        assert scalers[accelerator.KIND].get_scale() == scalers["cpu"].get_scale()


def several_streams() -> None:
    """One of two layers on a stream of its own, in forward and backward; its gradient may be one of no_sync() alone."""
    side, uses_both = SIM.Stream(DEVICE), [True]

    def loss(model: nn.Module, x: torch.Tensor, rank: int) -> torch.Tensor:
        if not uses_both[0]:
            return model[0](x).square().mean()
        if x.device.type == "cpu":
            return (model[0](x) + model[1](x)).square().mean()
        side.wait_stream(SIM.current_stream())
        x.record_stream(side)
        with SIM.stream(side):
            other = model[1](x)
        mine = model[0](x)
        SIM.current_stream().wait_stream(side)
        other.record_stream(SIM.current_stream())
        return (mine + other).square().mean()

    for bytes_per_pack in (0, 1):
        pair = Pair(lambda: layers(2), loss, bytes_per_pack=bytes_per_pack)
        pair.train()
        first, second = pair.inputs(), pair.inputs()

        def step(
            pair: Pair = pair, first: torch.Tensor = first, second: torch.Tensor = second
        ) -> None:
            pair.optimizers[0].zero_grad()
            with pair.strategy.no_sync():
                pair.backward(first)
            uses_both[0] = False
            pair.backward(second)
            uses_both[0] = True

        pair.strategy.run(step)


def what_failed_leaves_memory_alone() -> None:
    """A backward that fails when buckets have left: what is allocated next is not written by their sums."""
    fails = [False]

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            if fails[0]:
                raise ArithmeticError("as it was to")
            return gradient

    def loss(model: nn.Module, x: torch.Tensor, rank: int) -> torch.Tensor:
        return model[1](Fails.apply(model[0](x))).square().mean()

    pair = Pair(lambda: layers(2), loss, bytes_per_pack=1)
    pair.train()
    inputs = pair.inputs()
    fails[0] = True
    with pytest.raises(ArithmeticError, match="as it was to"):
        pair.strategy.run(lambda: pair.backward(inputs))
    fails[0] = False
    pair.train()


def short_sums() -> None:
    """In 16 bits where that was asked for: 256 + 1 is not a bfloat16, and stays 256 or goes to 258."""
    for dtype in (torch.bfloat16, torch.float32):
        for wire, expected in (("bfloat16", 256.0), (None, 257.0)):
            if SIZE != 2 or not NATIVELY:
                return
            strategy = strategy_with(wire_dtype=wire)
            with strategy.scope():
                weight = nn.Parameter(torch.zeros(3, dtype=dtype))
                holder = nn.ParameterList([weight])
            for _ in range(KNOWN + 1):
                weight.grad = None
                strategy.run(
                    lambda weight=weight: (
                        weight.float().sum() * (256.0 if RANK else 1.0)
                    ).backward()
                )
                rounded = torch.tensor(expected).to(dtype).item()
                assert weight.grad.tolist() == [rounded] * 3, (dtype, wire, weight.grad)
            del holder


def little_memory() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for overlap in (True, False):
            strategy = strategy_with(overlap=overlap)
            with strategy.scope():
                model = nn.Sequential(
                    nn.Linear(1024, 512, dtype=dtype),
                    *(nn.Linear(512, 512, dtype=dtype) for _ in range(38)),
                )
            parameters = list(model.parameters())
            gradients = sum(p.nbytes for p in parameters)
            x = torch.ones(1, 1024, device=DEVICE, dtype=dtype)

            def step(model: nn.Module = model, x: torch.Tensor = x) -> None:
                model(x).square().mean().backward()

            for number in range(KNOWN + 1):
                model.zero_grad()
                before = torch.accelerator.memory_allocated(DEVICE)
                torch.accelerator.reset_peak_memory_stats(DEVICE)
                strategy.run(step)
                peak = torch.accelerator.max_memory_allocated(DEVICE) - before
                assert peak <= MOST_MEMORY * gradients, (dtype, overlap, number, peak / gradients)
            if RANK == 0:
                print(f"peak {dtype} {overlap} {peak / gradients:.3f}", flush=True)


def the_host_does_not_wait() -> None:
    for width, count in ((4, 1), (64, 8), (256, 24)):
        for overlap in (None, False):
            pair = Pair(lambda: layers(count, width), shape=(width,), overlap=overlap)  # noqa: B023
            for _ in range(KNOWN + 2):
                inputs = pair.inputs()

                def step(pair: Pair = pair, inputs: torch.Tensor = inputs) -> None:
                    pair.optimizers[0].zero_grad()
                    loss = pair.loss(pair.model, inputs[RANK].to(DEVICE), RANK)
                    with accelerator.no_host_waits(SIM, asked_for=NATIVELY):
                        loss.backward()
                        pair.optimizers[0].step()

                pair.strategy.run(step)


def few_calls() -> None:
    if not NATIVELY:
        return
    pair, losses = Pair(layers, bytes_per_pack=1), []

    def forward() -> None:
        pair.model.zero_grad()
        losses.append(pair.loss(pair.model, torch.ones(BATCH, 6, device=DEVICE), RANK))

    trip = pair.strategy.run(lambda: least(lambda: losses.pop().backward(), forward))
    assert "while backward() runs" in pair.strategy.extended.explain()
    trip.check(MOST)


def calls_inside_backward() -> None:
    """The program's own calls stay in order with buckets while all ranks use the same parameters."""

    class Together(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, sums: Callable[..., Any]) -> torch.Tensor:
            ctx.sums = sums
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            return gradient + 0 * ctx.sums(gradient), None

    communicator = _SOME.communicator
    differ = [False]

    def sums(x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        communicator.all_reduce(total)
        return total

    def loss(model: nn.Module, x: torch.Tensor, rank: int) -> torch.Tensor:
        on_device = x.device.type != "cpu"
        for i, layer in enumerate(model):
            if differ[0] and i == 2 and rank == 0:
                continue
            x = layer(x)
            x = Together.apply(x, sums) if on_device and i % 2 else x
        return x.square().mean()

    pair = Pair(layers, loss, bytes_per_pack=1)
    for _ in range(KNOWN + 2):
        pair.step()
        pair.check()
    how = pair.strategy.extended.explain()
    assert ("while backward() runs" in how) == NATIVELY, how
    if NATIVELY:
        differ[0] = True
        with pytest.raises(ms.errors.CollectiveMismatchError, match="overlap=False"):
            pair.strategy.run(lambda: pair.backward(pair.inputs()))
    pair = Pair(layers, loss, bytes_per_pack=1)
    differ[0] = True
    for _ in range(KNOWN + 2):
        pair.step()
        pair.check()
    assert "communicates inside backward()" in pair.strategy.extended.explain()


def captured_graphs() -> None:
    pair = Pair(layers)
    inputs = pair.inputs()

    def step() -> None:
        loss = pair.loss(pair.model, inputs[RANK].to(DEVICE), RANK)
        with SIM.capture(), pytest.raises(RuntimeError, match="make_graphed_callables"):
            loss.backward()

    pair.strategy.run(step)
    pair.train()


def skipped_backward() -> None:
    """The error speaks of steps, and of nothing that buckets could have to do with it."""
    pair = Pair(layers, bytes_per_pack=1)
    pair.train()
    if RANK == 0:
        pair.strategy.run(lambda: None)
    with pytest.raises(ms.errors.CollectiveMismatchError, match="same step") as raised:
        pair.strategy.run(lambda: pair.backward(pair.inputs()))
    assert "overlap" not in str(raised.value)


CHECKS = [
    *(several_models, unused_parameters, checkpoints_inside, accumulation, mixed_dtypes),
    sparse_gradients,
    *(clipping_and_scaling, several_streams, what_failed_leaves_memory_alone),
    *(short_sums, little_memory, the_host_does_not_wait, few_calls, captured_graphs),
    *(calls_inside_backward, skipped_backward),
]


def stall() -> None:
    """The kernels of some bucket never end."""
    pair = Pair(layers, bytes_per_pack=200)
    pair.train()
    accelerator.hang()
    pair.step()
    SIM.synchronize()


def main() -> None:
    SIM.raise_violations(False)
    if sys.argv[1:] == ["stall"]:
        stall()
    for check in CHECKS:
        asked_for = sys.argv[1:] or [check.__name__ for check in CHECKS]
        if check.__name__ not in asked_for:
            continue
        check()
        unordered = SIM.violations()
        assert not unordered, (check.__name__, unordered[:5])
        if RANK == 0:
            print(f"holds: {check.__name__}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
