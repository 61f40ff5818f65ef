"""`shared_parameters=True`: one copy per node, and whatever a program does, the same as with a copy on each rank.

All other tests of this folder run with it, too.
"""

import copy
import gc
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from mpi4py import MPI

import mpistrat as ms
from mpistrat.communicators.construction import communicator_for
from mpistrat.communicators.node import shared_memory
from mpistrat.communicators.router import Router
from mpistrat.communicators.transports.window import WindowTransport
from mpistrat.errors import CollectiveMismatchError
from support.rank_errors import errors_of_ranks

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size

needs_peers = pytest.mark.mpi(min_size=2)


@pytest.fixture(autouse=True, scope="module")
def _large_is_what_memory_can_take() -> Iterator[None]:
    """Whatever was measured, nothing large is summed by MPI, in an order of its own."""
    communicator = communicator_for(WORLD)
    first = communicator.transports.preferred[0] if isinstance(communicator, Router) else None
    if not isinstance(first, WindowTransport):
        yield
        return
    assert first.shared_blocks()
    measured, first.borders = first.borders, [0]
    yield
    first.borders = measured


def net(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Several pages, of which slices of 2 to 4 ranks cut through the first parameter; and small ones."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(120, 100), torch.nn.Tanh(), torch.nn.Linear(100, 3)
    return torch.nn.Sequential(*layers).to(dtype)


class Training:
    """A model, an optimizer and a strategy; `step` is one of `strategy.run`."""

    def __init__(
        self,
        shared: bool,
        make: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.Adam(p, lr=0.01),
        build: Callable[[], torch.nn.Module] = net,
    ) -> None:
        self.shared = shared
        self.strategy = ms.MultiWorkerMirroredStrategy(gradients="mean", shared_parameters=shared)
        with self.strategy.scope():
            self.model = build()
            self.optimizer = make(self.model.parameters())
        self.dtype = next(self.model.parameters()).dtype
        self.generator = torch.Generator().manual_seed(RANK)

    def backward(self) -> None:
        x = torch.randn(8, 120, generator=self.generator).to(self.dtype)
        self.model(x).square().mean().backward()

    def plain(self) -> None:
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()

    def run(self, times: int = 1, step: Callable[[], None] | None = None) -> None:
        for _ in range(times):
            self.strategy.run(step or self.plain)

    def values(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def twice(play: Callable[[Training], Any], **arguments: Any) -> tuple[Training, Training]:
    """Play the same with parameters of each rank's own and with shared ones; both end equal, on all ranks.

    Bit by bit: models have more than 32 KB of a dtype, so that both ways sum through memory, in the order of the ranks.
    """
    own, shared = Training(False, **arguments), Training(True, **arguments)
    assert play(own) == play(shared)
    assert_same(own.values(), shared.values())
    theirs = WORLD.allgather(shared.values())
    assert_same(theirs[0], shared.values())
    return own, shared


def assert_same(ones: Any, others: Any) -> None:
    torch.testing.assert_close(ones, others, rtol=0, atol=0)


ELEMENTWISE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "SGD, fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "Adam, foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "Adam, fused": lambda p: torch.optim.Adam(p, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, foreach=True),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "Rprop": torch.optim.Rprop,
    "Adagrad": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.1),
    "Adadelta": torch.optim.Adadelta,
    "ASGD": lambda p: torch.optim.ASGD(p, t0=2),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_elementwise_optimizer(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own, shared = twice(lambda t: t.run(4), make=ELEMENTWISE[name])
    assert_same(own.optimizer.state_dict(), shared.optimizer.state_dict())


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64], ids=str
)
def test_dtypes(dtype: torch.dtype) -> None:
    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        mixed = torch.nn.Linear(120, 200), torch.nn.Linear(200, 90).to(dtype)
        return torch.nn.Sequential(*mixed)

    def play(training: Training) -> None:
        first, second = training.model.children()

        def step() -> None:
            training.optimizer.zero_grad()
            x = torch.randn(8, 120, generator=training.generator)
            output = second(first(x).to(dtype))
            output.abs().float().square().mean().backward()
            output = second(first(x).to(dtype))
            output.abs().float().mean().backward()
            training.optimizer.step()

        training.run(3, step)

    twice(play, build=build, make=lambda p: torch.optim.SGD(p, 0.01, momentum=0.9))


@needs_peers
def test_there_is_one_copy() -> None:
    training = Training(True)
    training.run(3)
    weight = training.model[0].weight  # type: ignore[index]
    state = training.optimizer.state[weight]
    for tensor in (weight.detach(), weight.grad, state["exp_avg"], state["exp_avg_sq"]):
        inodes = WORLD.allgather(inode_of(tensor.data_ptr()))
        assert len(set(inodes)) == 1, inodes
        assert inodes[0] != 0
        assert pages_of_its_own(tensor) == 0


def inode_of(address: int) -> int:
    """Of the file that is mapped there; 0 for memory of the process's own."""
    with open("/proc/self/maps") as lines:
        for line in lines:
            first, end = (int(bound, 16) for bound in line.split()[0].split("-"))
            if first <= address < end:
                return int(line.split()[4])
    raise AssertionError(f"{address:#x} is not mapped")


def pages_of_its_own(tensor: torch.Tensor) -> int:
    """How many of the pages that hold `tensor` were written by this process, so that it has copies of them."""
    first, end = tensor.data_ptr() // 4096, (tensor.data_ptr() + tensor.nbytes - 1) // 4096 + 1
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(8 * first)
        entries = memoryview(file.read(8 * (end - first))).cast("Q")
    return sum(1 for entry in entries if entry >> 62 and not entry >> 61 & 1)


@needs_peers
def test_memory_is_given_back() -> None:
    gc.collect()
    before = shared_memory.own_bytes()
    training = Training(True)
    training.run(2)
    assert shared_memory.own_bytes() > before
    del training
    gc.collect()
    assert shared_memory.own_bytes() == before


def clip(training: Training) -> float:
    return float(torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.01))


@pytest.mark.parametrize("steps", [3, 60])  # the second: until private copies are given up once
def test_clipping(steps: int) -> None:
    def play(training: Training) -> list[float]:
        norms = []

        def step() -> None:
            training.optimizer.zero_grad()
            training.backward()
            norms.append(clip(training))
            training.optimizer.step()

        training.run(steps, step)
        training.run(2)
        return norms

    twice(play)


def test_scaling_loss() -> None:
    def play(training: Training) -> float:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

        def step() -> None:
            training.optimizer.zero_grad()
            x = torch.randn(8, 120, generator=training.generator)
            scaler.scale(training.model(x).square().mean()).backward()
            scaler.unscale_(training.optimizer)
            clip(training)
            scaler.step(training.optimizer)
            scaler.update()

        training.run(4, step)
        return scaler.get_scale()

    twice(play)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_with_changes_between(set_to_none: bool) -> None:
    def play(training: Training) -> None:
        def step() -> None:
            training.optimizer.zero_grad(set_to_none=set_to_none)
            training.backward()
            clip(training)
            training.backward()
            for parameter in training.model.parameters():
                assert parameter.grad is not None
                parameter.grad.data.mul_(0.5)  # which torch counts as no change
            with training.strategy.no_sync():
                training.backward()
            training.backward()
            training.optimizer.step()

        training.run(5, step)

    twice(play)


def test_gradients_that_the_program_replaces() -> None:
    def play(training: Training) -> None:
        def step() -> None:
            training.optimizer.zero_grad()
            training.backward()
            first = next(training.model.parameters())
            assert first.grad is not None
            first.grad = first.grad.t().contiguous().t() * 2
            training.backward()
            last = list(training.model.parameters())[-1]
            last.grad = torch.ones_like(last)
            training.optimizer.step()

        training.run(3, step)

    twice(play)


def test_gradients_that_the_program_keeps_stay_as_they_are() -> None:
    def play(training: Training) -> None:
        kept, copies = [], []

        def step() -> None:
            training.plain()
            for parameter in training.model.parameters():
                assert parameter.grad is not None
                kept.append(parameter.grad.view(-1)[1:])
                copies.append(kept[-1].clone())

        training.run(4, step)
        assert_same(kept, copies)

    twice(play)


def test_parameters_changed_by_hand() -> None:
    def play(training: Training) -> None:
        parameters = list(training.model.parameters())

        def step() -> None:
            training.optimizer.zero_grad()
            training.backward()
            with torch.no_grad():
                for parameter in parameters:
                    assert parameter.grad is not None
                    parameter -= (
                        0.1 * parameter.grad
                    )  # once per rank, and not once for each of them
            training.optimizer.step()
            for parameter in parameters:
                parameter.data.clamp_(-0.05, 0.05)

        training.run(4, step)

    twice(play)


def test_one_rank_evaluates_with_other_weights() -> None:
    def play(training: Training) -> None:
        training.run(2)
        average = [p.detach().clone().mul_(0.9) for p in training.model.parameters()]
        training.run(2)
        if RANK == 0:
            kept = training.values()
            for parameter, value in zip(training.model.parameters(), average, strict=True):
                parameter.data.copy_(value)
            assert_same(training.values(), average)
            for parameter, value in zip(training.model.parameters(), kept, strict=True):
                parameter.data.copy_(value)
        training.run(2)

    twice(play)


def test_a_checkpoint_by_one_rank_goes_on_without_sharing() -> None:
    training = Training(True)
    training.run(3)
    saved = None
    if RANK == 0:  # alone: nothing of it is collective
        file = io.BytesIO()
        torch.save([training.model.state_dict(), training.optimizer.state_dict()], file)
        assert len(file.getvalue()) < 4 * sum(p.nbytes for p in training.model.parameters())
        saved = file.getvalue()
    saved = WORLD.bcast(saved)

    def play(other: Training) -> None:
        other.run(1)  # it has a state that is replaced
        model, optimizer = torch.load(io.BytesIO(saved))
        other.model.load_state_dict(model)
        other.optimizer.load_state_dict(optimizer)
        other.generator.set_state(training.generator.get_state())
        other.run(2)

    own, _ = twice(play)
    assert_same(own.optimizer.state_dict()["state"][0]["step"], torch.tensor(5.0))
    training.run(2)
    assert_same(own.values(), training.values())


def test_weights_that_rank_0_alone_has_loaded() -> None:
    def play(training: Training) -> None:
        training.run(2)
        if RANK == 0:
            training.model.load_state_dict(
                {k: v + 1 for k, v in training.model.state_dict().items()}
            )
        training.strategy.mirror(training.model)
        weight = training.model[0].weight  # type: ignore[index]
        shared = training.shared and SIZE > 1
        assert not shared or pages_of_its_own(weight.detach()) == 0
        training.run(2)

    twice(play)


def test_an_optimizer_s_state_changed_by_the_program() -> None:
    def play(training: Training) -> None:
        training.run(2)
        for state in training.optimizer.state.values():
            state["exp_avg"].data.zero_()
            state["exp_avg_sq"] = state["exp_avg_sq"] * 2
        training.run(2)
        first = next(training.model.parameters())
        del training.optimizer.state[first]
        training.run(2)

    own, shared = twice(play)
    assert_same(own.optimizer.state_dict(), shared.optimizer.state_dict())


def test_schedulers_groups_and_frozen_parameters() -> None:
    def play(training: Training) -> None:
        *others, first = training.model.parameters()
        first.requires_grad_(False)
        training.optimizer = torch.optim.SGD(others[:2], 0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.5)
        for more in ([], others[2:], [first]):
            if more:
                training.optimizer.add_param_group({"params": more, "lr": 0.01})
                scheduler.base_lrs.append(0.01)
            first.requires_grad_(any(p is first for p in more))
            training.run(2)
            scheduler.step()

    twice(play)


def test_parameters_that_no_rank_used() -> None:
    def play(training: Training) -> None:
        head = training.model[2]  # type: ignore[index]

        def step() -> None:
            training.optimizer.zero_grad()
            head(torch.ones(2, 100)).sum().backward()
            assert all(p.grad is None for p in training.model[0].parameters())  # type: ignore[index]
            training.optimizer.step()

        training.run(1)
        training.run(2, step)
        training.run(1)

    own, shared = twice(play)
    assert_same(own.optimizer.state_dict(), shared.optimizer.state_dict())


def test_other_memory_layouts() -> None:
    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(5, 30, 3), torch.nn.Conv2d(30, 20, 3))
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        model.register_parameter("turned", torch.nn.Parameter(torch.randn(40, 50).t()))
        base = torch.randn(2, 60)
        model.register_parameter("first", torch.nn.Parameter(base[0]))
        model.register_parameter("second", torch.nn.Parameter(base[1]))  # in the same storage
        return model

    def play(training: Training) -> None:
        def step() -> None:
            training.optimizer.zero_grad()
            x = torch.randn(2, 5, 9, 9, generator=training.generator)
            loss = torch.nn.Sequential(*training.model.children())(x).square().mean()
            loss = loss + (training.model.turned * torch.arange(40.0)).square().mean()
            (loss + training.model.first.sum() + training.model.second.square().sum()).backward()
            training.optimizer.step()

        training.run(3, step)

    _, shared = twice(play, build=build)
    assert shared.model[0].weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[index, union-attr, operator, call-overload]


MADE_OF_ANOTHER: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda memory: memory,
    "rows": lambda memory: memory[3:50],
    "columns": lambda memory: memory[:, :60],
    "one number": lambda memory: memory[2, :1],
}


@pytest.mark.parametrize("part", MADE_OF_ANOTHER)
@pytest.mark.parametrize("later", [True, False])
def test_a_parameter_made_of_another_s_memory(part: str, later: bool) -> None:
    """It goes on following the other one, which is shared already if it comes later; steps of both reach both."""

    def add(model: torch.nn.Module) -> torch.nn.Parameter:
        weight = model[0].weight  # type: ignore[index]
        again = torch.nn.Parameter(MADE_OF_ANOTHER[part](weight.data))
        model.register_parameter("again", again)
        return again

    def build() -> torch.nn.Module:
        model = net()
        if not later:
            add(model)
        return model

    def play(training: Training) -> None:
        def step() -> None:
            training.optimizer.zero_grad()
            if (again := getattr(training.model, "again", None)) is not None:
                factor = torch.linspace(0.0, 1.0 + RANK, again.numel()).view(again.shape)
                (again * factor).square().mean().backward()
            training.backward()
            training.optimizer.step()

        training.run(3, step)
        if later:
            with training.strategy.scope():
                training.optimizer.add_param_group({"params": [add(training.model)]})
        training.run(3, step)
        weight, again = training.model[0].weight, training.model.again  # type: ignore[index]
        assert again is not None
        assert_same(MADE_OF_ANOTHER[part](weight.detach()), again.detach())
        training.strategy.mirror(training.model[0])  # type: ignore[index]
        training.run(3, step)
        assert_same(MADE_OF_ANOTHER[part](weight.detach()), again.detach())

    twice(play, build=build)


def test_a_parameter_made_of_one_that_a_rank_has_freed() -> None:
    def play(training: Training) -> None:
        training.run(2)
        first = training.model[0]  # type: ignore[index]
        kept = [first.weight] if RANK == 0 else []
        with training.strategy.scope():
            first.weight = torch.nn.Parameter(first.weight.data)
            training.optimizer = torch.optim.Adam(training.model.parameters())
        gc.collect()
        training.run(3)
        assert all(parameter.data_ptr() == first.weight.data_ptr() for parameter in kept)

    twice(play)


def test_single_numbers_are_each_rank_s_own() -> None:
    def build() -> torch.nn.Module:
        return torch.nn.Sequential(*net().children(), torch.nn.PReLU())

    own, shared = (Training(sharing, build=build) for sharing in (False, True))
    for training in (own, shared):
        training.run(3)
    # One number alone is summed in MPI's order.
    torch.testing.assert_close(own.values(), shared.values())
    slope = list(shared.model.parameters())[-1]
    assert inode_of(slope.data_ptr()) == 0
    assert len(set(WORLD.allgather(slope.item()))) == 1
    assert shared.optimizer.state_dict()["state"][4]["step"] == 3


def test_sparse_gradients() -> None:
    def play(training: Training) -> None:
        def step() -> None:
            training.optimizer.zero_grad()
            training.model(torch.tensor([RANK, 40, 40])).square().sum().backward()
            assert next(training.model.parameters()).grad.is_sparse  # type: ignore[union-attr]
            training.optimizer.step()

        training.run(3, step)

    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Embedding(50, 60, sparse=True)

    twice(play, build=build, make=lambda p: torch.optim.SGD(p, 0.1))


def test_a_module_that_changes_its_dtype_is_shared_again() -> None:
    def play(training: Training) -> None:
        training.run(2)
        training.model.double()
        training.dtype = torch.float64
        training.optimizer = torch.optim.Adam(training.model.parameters())
        training.run(2)

    twice(play)
    training = Training(True)
    play(training)
    weight = training.model[0].weight  # type: ignore[index]
    assert SIZE == 1 or len(set(WORLD.allgather(inode_of(weight.data_ptr())))) == 1


@needs_peers
def test_memory_given_to_a_parameter_inside_run() -> None:
    training = Training(True)
    first = next(training.model.parameters())

    def step() -> None:
        training.optimizer.zero_grad()
        training.backward()
        if RANK == 0:
            first.data = first.data.clone()
        training.optimizer.step()

    errors = errors_of_ranks(lambda: training.run(1, step))
    assert all(name == "CollectiveMismatchError" for name, _, _ in errors)
    assert all("parameter.copy_(…)" in text for _, text, _ in errors)


@needs_peers
def test_ranks_that_accumulate_differently() -> None:
    training = Training(True)
    training.run(1)

    def step() -> None:
        if RANK == 0:
            training.optimizer.zero_grad()
        training.backward()

    with pytest.raises(CollectiveMismatchError, match="sum_into"):
        training.run(1, step)


@needs_peers
@pytest.mark.parametrize(
    "make", [torch.optim.Adafactor, lambda p: torch.optim.SGD(p, 0.1)], ids=["class", "closure"]
)
def test_steps_that_need_whole_parameters(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    def play(training: Training) -> None:
        closure = isinstance(training.optimizer, torch.optim.SGD)

        def evaluate() -> float:
            training.optimizer.zero_grad()
            training.backward()
            return 0.0

        def step() -> None:
            if closure:
                training.optimizer.step(evaluate)
            else:
                evaluate()
                training.optimizer.step()

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            training.run(4, step)
        messages = [w for w in caught if "every rank computes whole steps" in str(w.message)]
        assert len(messages) == (training.shared and RANK == 0)
        training.run(1, step)

    twice(play, make=make)


class Signs(torch.optim.Optimizer):
    """Element-wise, by an author who counts in attributes, groups and plain numbers, and makes new tensors."""

    elementwise = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01, "taken": 0})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        self.state["all"]["calls"] = self.calls
        for group in self.param_groups:
            group["taken"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    state["mean"] = state.get("mean", 0) * 0.5 + parameter.grad
                    parameter -= group["lr"] * state["mean"].sign() / state["count"]


def test_an_elementwise_optimizer_of_the_user_s() -> None:
    def play(training: Training) -> Any:
        training.run(3)
        optimizer = training.optimizer
        assert isinstance(optimizer, Signs)
        return optimizer.calls, optimizer.param_groups[0]["taken"], optimizer.state["all"]

    own, shared = twice(play, make=Signs)
    assert play(own) == (6, 6, {"calls": 6})
    own.strategy.extended.communicator.barrier()
    shared.run(3)
    for own_parameter, other in zip(own.model.parameters(), shared.model.parameters(), strict=True):
        assert_same(own.optimizer.state[own_parameter], shared.optimizer.state[other])


def test_a_step_that_fails_leaves_the_optimizer_as_it_was() -> None:
    class Failing(Signs):
        fails = False

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            if self.fails:
                raise ArithmeticError("on all ranks")
            super().step()

    def play(training: Training) -> None:
        training.run(2)
        training.optimizer.fails = True  # type: ignore[attr-defined]
        with pytest.raises(ArithmeticError):
            training.run(1)
        assert training.optimizer.param_groups[0]["params"] == list(training.model.parameters())
        training.optimizer.fails = False  # type: ignore[attr-defined]
        training.run(2)

    twice(play, make=Failing)


def test_a_graph_does_not_outlive_a_step() -> None:
    def play(training: Training) -> None:
        def step() -> None:
            loss = training.model(torch.ones(1, 120)).sum()
            loss.backward(retain_graph=True)
            training.optimizer.step()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()

        training.run(1, step)

    twice(play)


def test_copies_of_models_and_optimizers_are_private() -> None:
    def play(training: Training) -> None:
        training.run(2)
        model, optimizer = copy.deepcopy((training.model, training.optimizer))
        before = [p.detach().clone() for p in model.parameters()]
        states = copy.deepcopy(optimizer.state_dict())
        training.run(2)
        assert_same([p.detach() for p in model.parameters()], before)
        assert_same(optimizer.state_dict(), states)

    twice(play)


def test_lazy_modules_and_modules_added_later() -> None:
    def build() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.LazyLinear(60), torch.nn.Tanh())

    def play(training: Training) -> None:
        torch.manual_seed(RANK)
        training.strategy.run(lambda: training.model(torch.ones(1, 120)))
        with training.strategy.scope():
            torch.manual_seed(RANK)
            training.model.append(torch.nn.Linear(60, 40))  # type: ignore[operator]
        training.optimizer = torch.optim.Adam(training.model.parameters())
        training.run(3)

    twice(play, build=build)


@needs_peers
def test_no_memory_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPISTRAT_SHARED_MB", "4")  # enough for messages, and for little more
    comm = WORLD.Dup()
    strategy = ms.MultiWorkerMirroredStrategy(gradients="mean", shared_parameters=True, comm=comm)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with strategy.scope():
            model = torch.nn.Linear(1000, 1000)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
    texts = [str(w.message) for w in caught]
    assert any("MPISTRAT_SHARED_MB" in text for text in texts) == (RANK == 0), texts

    def step() -> None:
        optimizer.zero_grad()
        model(torch.full((1, 1000), float(RANK))).sum().backward()
        optimizer.step()

    strategy.run(step)
    weights = WORLD.allgather(model.weight.detach())
    assert_same(weights[0], weights[-1])
    assert inode_of(model.weight.data_ptr()) == 0


def test_arguments() -> None:
    with pytest.raises(ValueError, match="shared_parameters=True takes one replica per rank"):
        ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"], shared_parameters=True)
    with pytest.raises(ValueError, match="shared_parameters must be True or False, got 'yes'"):
        ms.MirroredStrategy(shared_parameters="yes")  # type: ignore[arg-type]
    short = ms.CommunicationOptions(wire_dtype="bfloat16")
    with pytest.raises(ValueError, match="leave out wire_dtype"):
        ms.MultiWorkerMirroredStrategy(communication_options=short, shared_parameters=True)


@needs_peers
def test_only_some_ranks_share() -> None:
    def make() -> None:
        ms.MultiWorkerMirroredStrategy(gradients="sum", shared_parameters=RANK == 0)

    errors = errors_of_ranks(make)
    assert all(name == "CollectiveMismatchError" for name, _, _ in errors)
    assert all("shared_parameters=True" in text for _, text, _ in errors)


@needs_peers
def test_mirrored_strategy_shares_within_the_node() -> None:
    strategy = ms.MirroredStrategy(gradients="mean", shared_parameters=True)
    with strategy.scope():
        model = net()
    address = next(model.parameters()).data_ptr()
    inodes = strategy.extended.communicator.all_gather_object(inode_of(address))
    assert strategy.num_replicas_in_sync == 1 or (len(set(inodes)) == 1 and inodes[0] != 0)
