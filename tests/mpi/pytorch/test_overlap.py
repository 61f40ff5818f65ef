"""Gradients that leave while `backward()` runs: early, right whatever each rank uses, None where nobody does."""

import gc
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import mpistrat as ms
from mpistrat.communicators.communication_thread import CommunicationThread
from mpistrat.communicators.local import LocalCommunicator
from mpistrat.cross_device_ops.packing import Packer
from mpistrat.pytorch.gradients.wires import Wire, Wires
from mpistrat.pytorch.modules.registry import Registry
from mpistrat.wire_formats import TopK
from support.training.whole_batch import BATCH, Pair, equal_on_all_ranks, loss_of, plain_step

pytestmark = pytest.mark.mpi(min_size=2)

SECONDS_TO_ARRIVE = 30.0
KNOWN = 3  # steps after which gradients leave early


@pytest.fixture
def overlapping() -> ms.Strategy:
    """One that sends every parameter's gradient by itself."""
    one_by_one = ms.CommunicationOptions(overlap=True, bytes_per_pack=1)
    return ms.MultiWorkerMirroredStrategy(communication_options=one_by_one, gradients="sum")


Submitted = list[tuple[CommunicationThread, "Future[None]"]]


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> Submitted:
    """What leaves, while `backward()` runs or when it has ended, and the thread that sends it."""
    submit = CommunicationThread.submit
    sent: Submitted = []

    def note(thread: CommunicationThread, *arguments: Any) -> "Future[None]":
        sent.append((thread, submit(thread, *arguments)))
        return sent[-1][1]

    monkeypatch.setattr(CommunicationThread, "submit", note)
    return sent


class Until(torch.autograd.Function):
    """The identity; its backward returns once `arrived()`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, arrived: Callable[[], bool]) -> torch.Tensor:
        ctx.arrived = arrived
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        deadline = time.monotonic() + SECONDS_TO_ARRIVE
        while not ctx.arrived():
            assert time.monotonic() < deadline, "nothing was sent before backward() ended"
            time.sleep(0.001)
        return gradient, None


def test_the_last_layer_arrives_before_the_first_has_a_gradient(
    overlapping: ms.Strategy, submitted: Submitted
) -> None:
    with overlapping.scope():
        first, last = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    early = []
    is_known = False

    def arrived() -> bool:
        if not is_known:
            return True
        done = [sent.done() for _, sent in submitted]
        if done == [True, True]:
            early.append(first.weight.grad)
        return done == [True, True]

    def step() -> None:
        first.zero_grad()
        last.zero_grad()
        last(Until.apply(first(torch.ones(2, 3)), arrived)).sum().backward()

    for number in range(KNOWN + 2):
        is_known = number >= KNOWN
        submitted.clear()
        overlapping.run(step)
    assert early == [None, None]
    assert equal_on_all_ranks(overlapping, first.weight.grad)


def test_ranks_use_different_parameters(overlapping: ms.Strategy) -> None:
    """Parameter i gets the sum of rank + 1 over the ranks that use it; nothing where none does."""
    count = 3
    with overlapping.scope():
        model = torch.nn.ParameterList([torch.zeros(5) for _ in range(count)])
    communicator = overlapping.extended.communicator

    def used(step: int, rank: int) -> list[int]:
        if step < KNOWN:
            return list(range(count))
        return [i for i in range(count) if i < 2 and (step + i + rank) % 3]

    def step_of(number: int) -> Callable[[], None]:
        def step() -> None:
            for parameter in model:
                parameter.grad = None
            loss = torch.zeros((), requires_grad=True) * 1
            for i in used(number, communicator.rank):
                loss = loss + model[i].sum() * (communicator.rank + 1)
            loss.backward()

        return step

    for number in range(KNOWN + 6):
        overlapping.run(step_of(number))
        for i, parameter in enumerate(model):
            users = [rank for rank in range(communicator.size) if i in used(number, rank)]
            if not users:
                assert parameter.grad is None, (number, i)
            else:
                expected = torch.full((5,), float(sum(rank + 1 for rank in users)))
                assert torch.equal(parameter.grad, expected), (number, i)


def test_memory_of_buckets_is_kept(
    overlapping: ms.Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the program holds a gradient, or a view of one, or a backward fails; a step then makes few calls."""
    allocated: list[int] = []
    memory = Packer.memory

    def counted(packer: Packer, length: int, *rest: Any, **more: Any) -> Any:
        allocated.append(length)
        return memory(packer, length, *rest, **more)

    monkeypatch.setattr(Packer, "memory", counted)
    rank, size = overlapping.extended.communicator.rank, overlapping.extended.communicator.size
    with overlapping.scope():
        model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(3)))
    weight = model[-1].weight
    calls: list[str] = []
    fails = False

    def see(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.endswith(("arrivals.py", "buckets.py", "overlap.py")):
            calls.append(frame.f_code.co_name)

    def step(factor: float) -> None:
        model.zero_grad()
        hidden = model[0](torch.ones(1, 3))
        if fails:
            hidden.register_hook(lambda gradient: 1 / 0)
        loss = model[1:](hidden).sum() * (rank + 1) * factor
        sys.setprofile(see)
        try:
            loss.backward()
        finally:
            sys.setprofile(None)

    def trained(factor: float) -> int:
        """How often memory was allocated in a step."""
        allocated.clear()
        overlapping.run(step, args=(factor,))
        expected = model[1](model[0](torch.ones(1, 3))).detach() * factor * size * (size + 1) / 2
        torch.testing.assert_close(weight.grad[0], expected[0])
        return len(allocated)

    for number in range(KNOWN + 1):
        trained(number)
    assert [trained(1.0), trained(2.0)] == [0, 0]
    holds: list[Callable[[Any], Any]] = [lambda g: g, lambda g: g[0], lambda g: g.numpy()]
    for hold in holds:
        held = hold(weight.grad)
        before = torch.as_tensor(held).clone()
        assert [trained(3.0) <= 1, trained(4.0)] == [True, 0]
        assert torch.equal(torch.as_tensor(held), before)
        del held
    fails = True
    with pytest.raises(ZeroDivisionError):
        overlapping.run(step, args=(6.0,))
    fails = False
    assert trained(7.0) <= 1
    calls.clear()
    assert trained(8.0) == 0
    assert (calls.count("hook"), calls.count("filled")) == (6, 6)
    assert len(calls) < 6 + 2 * 6 + 24, calls


class Recurring(torch.nn.Module):
    """One layer three times, each recomputed in a backward of its own: its gradient comes in three parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.out = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for _ in range(3):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return self.out(x)


def test_a_gradient_that_grows_after_it_was_sent(overlapping: ms.Strategy) -> None:
    Pair(overlapping, Recurring).train(plain_step, steps=KNOWN + 3)


def test_means_and_accumulation(overlapping: ms.Strategy) -> None:
    """Without zero_grad, and with no_sync() before: what waits there leaves with the rest."""
    pair = Pair(overlapping)

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        loss_of(model(x * 2), y).backward()
        if model is pair.model:
            with overlapping.no_sync():
                loss_of(model(x * 3), y).backward()
        else:
            loss_of(model(x * 3), y).backward()
        loss_of(model(x * 4), y).backward()
        optimizer.step()

    pair.train(step, steps=KNOWN + 3)


@pytest.mark.parametrize("bytes_per_pack", [1, 200, 0])
def test_the_same_bits_with_and_without(bytes_per_pack: int) -> None:
    """Through memory, where every element is the sum in rank order, however gradients are packed."""
    found = []
    for overlap in (True, False):
        options = ms.CommunicationOptions(overlap=overlap, bytes_per_pack=bytes_per_pack)
        strategy = ms.MultiWorkerMirroredStrategy(communication_options=options, gradients="mean")
        torch.manual_seed(0)
        with strategy.scope():
            model = torch.nn.Sequential(*(torch.nn.Linear(200, 200) for _ in range(4)))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rank = strategy.extended.communicator.rank
        x = torch.randn(BATCH, 200, generator=torch.Generator().manual_seed(rank))

        def step(model: Any = model, optimizer: Any = optimizer, x: Any = x) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        for _ in range(KNOWN + 3):
            strategy.run(step)
        reason = "as asked for"
        how = "while backward() runs" if overlap else "when backward() has ended"
        assert f"gradients are reduced {how}: {reason}" in strategy.extended.explain()
        found.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    if strategy.extended.communicator.size == 2:  # two summands have one order through MPI, too
        assert torch.equal(*found)
    else:
        torch.testing.assert_close(*found)


def test_few_bytes_are_not_worth_it(one_per_rank: ms.Strategy) -> None:
    Pair(one_per_rank).train(plain_step, steps=KNOWN)
    assert "gradients are reduced when backward() has ended" in one_per_rank.extended.explain()
    assert "bytes are too few" in one_per_rank.extended.explain()


def test_virtual_replicas_take_turns() -> None:
    options = ms.CommunicationOptions(overlap=True)
    strategy = ms.MultiWorkerMirroredStrategy(
        devices=["cpu:0", "cpu:1"], communication_options=options, gradients="sum"
    )
    Pair(strategy).train(plain_step, steps=KNOWN)
    assert "several replicas of a rank take turns" in strategy.extended.explain()


def test_a_hook_of_the_program_sees_gradients(overlapping: ms.Strategy) -> None:
    """Its own, of this replica; one that writes to them is told that they have left."""
    with overlapping.scope():
        layer = torch.nn.Linear(3, 3)
    rank, size = overlapping.extended.communicator.rank, overlapping.extended.communicator.size
    seen = []
    layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad[0, 0].item()))

    def step() -> None:
        layer.zero_grad()
        (layer(torch.ones(1, 3)).sum() * (rank + 1)).backward()

    for _ in range(KNOWN + 2):
        overlapping.run(step)
        assert layer.weight.grad[0, 0] == size * (size + 1) / 2
    assert seen == [rank + 1] * (KNOWN + 2)

    def double(parameter: torch.Tensor) -> None:
        parameter.grad.mul_(2)

    layer.weight.register_post_accumulate_grad_hook(double)
    with pytest.raises(RuntimeError, match="changed after it was sent"):
        overlapping.run(step)


def test_residuals_do_not_pile_up() -> None:
    """Of sets of parameters that come again they are kept, though others come in between."""
    registry = Registry()
    parameters = [torch.zeros(10, requires_grad=True) for _ in range(102)]
    for parameter in parameters:
        registry.add_parameter("", parameter)
    wires = Wires(TopK(1.0), registry)
    alone = LocalCommunicator()

    def use(*slots: int) -> Wire:
        wire = wires.of(list(slots))
        assert wire is not None
        wire(alone, torch.zeros(10 * len(slots)))
        return wire

    for backward in range(100):
        first = use(0)
        use(1, 2 + backward)
        wires.of([backward])  # this rank has no message to send for it
        wires.end_backward()
        assert wires.of([0]) is first
        held_back = wires.state()["held_back"]
        assert sum(len(held["residual"]) for held in held_back) <= 4 * 30
        assert len(held_back) <= 4 * 30 / 10


def test_a_model_in_place_of_another(overlapping: ms.Strategy) -> None:
    """Its parameters have the numbers that the other's had."""
    Pair(overlapping).train(plain_step, steps=KNOWN + 1)
    gc.collect()
    Pair(overlapping, Recurring).train(plain_step, steps=KNOWN + 1)
    gc.collect()
    Pair(overlapping).train(plain_step, steps=KNOWN + 1)


def test_strategies_share_a_thread(overlapping: ms.Strategy, submitted: Submitted) -> None:
    threads = set()
    for _ in range(3):
        strategy = ms.MultiWorkerMirroredStrategy(
            communication_options=ms.CommunicationOptions(overlap=True), gradients="sum"
        )
        submitted.clear()
        Pair(strategy).train(plain_step, steps=KNOWN + 1)
        assert submitted
        threads.update(thread for thread, _ in submitted)
    assert len(threads) == 1


class OwnFormat:
    """A plug-in without a `__repr__`, which prints an address of its own on each rank."""

    def combine(self, communicator: Any, values: torch.Tensor, residual: torch.Tensor) -> None:
        communicator.all_reduce(values)


@pytest.mark.parametrize("overlap", [True, False])
def test_wire_formats_of_a_program(overlap: bool) -> None:
    options = ms.CommunicationOptions(overlap=overlap, wire_format=OwnFormat())
    strategy = ms.MultiWorkerMirroredStrategy(communication_options=options, gradients="sum")
    Pair(strategy).train(plain_step, steps=KNOWN + 2)


@pytest.mark.parametrize("implementation", ["RING", "MPI"])
def test_by_another_implementation(implementation: str) -> None:
    options = ms.CommunicationOptions(
        overlap=True, implementation=implementation, wire_dtype="bfloat16"
    )
    strategy = ms.MultiWorkerMirroredStrategy(communication_options=options, gradients="sum")
    Pair(strategy).train(plain_step, steps=KNOWN + 2)
