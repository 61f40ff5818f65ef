"""Several replicas of one rank: training is that of as many ranks, and each replica has its own state."""

import contextvars
import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mpistrat as ms
from support.training.whole_batch import (
    FEATURES,
    Pair,
    assert_same_parameters,
    batches,
    build,
    loss_of,
    own,
    plain_step,
    replica_id,
    small_net,
)

REPLICAS = 4


@pytest.fixture
def split(one_per_rank: ms.Strategy) -> ms.Strategy:
    """REPLICAS replicas: 4 ranks × 1, 2 × 2 or 1 × 4; with 3 ranks, 2 on each."""
    ranks = one_per_rank.num_replicas_in_sync
    replicas = REPLICAS // ranks if REPLICAS % ranks == 0 else 2
    devices = [f"cpu:{i}" for i in range(replicas)]
    return ms.MultiWorkerMirroredStrategy(devices=devices, gradients="sum")


class Simulated:
    """One copy of a model per replica in this process, with its own buffers and random numbers."""

    def __init__(self, model: torch.nn.Module, replicas: int, lr: float = 0.1) -> None:
        self.copies = [copy.deepcopy(model) for _ in range(replicas)]
        self.optimizers = [torch.optim.SGD(c.parameters(), lr=lr) for c in self.copies]
        self.generators = [torch.get_rng_state() for _ in range(replicas)]

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        before = torch.get_rng_state()
        n = len(self.copies)
        for i, (model, own_x, own_y) in enumerate(
            zip(self.copies, x.tensor_split(n), y.tensor_split(n), strict=True)
        ):
            torch.set_rng_state(self.generators[i])
            model.zero_grad()
            loss_of(model(own_x), own_y).backward()
            self.generators[i] = torch.get_rng_state()
        torch.set_rng_state(before)
        for of_all in zip(*(model.parameters() for model in self.copies), strict=True):
            total = torch.stack([parameter.grad for parameter in of_all]).sum(0)
            for parameter in of_all:
                parameter.grad = total.clone()
        for buffers in zip(*(model.buffers() for model in self.copies), strict=True):
            average = torch.stack([b.double() for b in buffers]).mean(0)
            for buffer in buffers:
                buffer.copy_(average)
        for optimizer in self.optimizers:
            optimizer.step()


def dropout_and_batch_norm() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 6),
        torch.nn.BatchNorm1d(6),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(6, 2),
    )


def check_like_simulated(model: torch.nn.Module, simulated: Simulated) -> None:
    assert_same_parameters(model, simulated.copies[0])
    torch.testing.assert_close(dict(model.state_dict()), dict(simulated.copies[0].state_dict()))


def training_with_dropout(
    strategy: ms.Strategy, between_steps: Callable[[Simulated], None], steps: int = 4
) -> None:
    """Train and compare; `between_steps` may draw and seed, in the program and in the simulation."""
    model = build(strategy, dropout_and_batch_norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(42)
    simulated = Simulated(model, strategy.num_replicas_in_sync)
    data = batches()
    for _ in range(steps):
        x, y = (torch.cat([t, t])[:24] for t in next(data))
        strategy.run(lambda x=x, y=y: plain_step(model, optimizer, own(x), own(y)))
        simulated.step(x, y)
        check_like_simulated(model, simulated)
        between_steps(simulated)


def test_training_is_the_same_in_every_split(split: ms.Strategy) -> None:
    """4 × 1, 2 × 2 and 1 × 4 are compared with one simulation: dropout, batch norm, gradients."""
    training_with_dropout(split, lambda simulated: None)


def test_seeding_between_runs_seeds_every_replica(split: ms.Strategy) -> None:
    def seed(simulated: Simulated) -> None:
        torch.manual_seed(7)
        simulated.generators = [torch.get_rng_state() for _ in simulated.generators]

    training_with_dropout(split, seed)


def test_numbers_drawn_between_runs_count_for_every_replica(split: ms.Strategy) -> None:
    """As on ranks of their own, where each program draws them (a DataLoader does)."""

    def draw(simulated: Simulated) -> None:
        torch.rand(3)
        simulated.generators = [torch.get_rng_state() for _ in simulated.generators]

    training_with_dropout(split, draw)


def test_replicas_that_seed_themselves_keep_their_own_numbers(split: ms.Strategy) -> None:
    split.run(lambda: (torch.manual_seed(replica_id()), None)[1])
    for _ in range(2):
        drawn = split.experimental_local_results(split.run(lambda: torch.rand(4)))
        if split.extended.num_local_replicas > 1:
            torch.rand(1)  # the program's own draw is replica 0's
    first = split.extended.first_replica_id
    for i, numbers in enumerate(drawn[1:], start=1):
        generator = torch.Generator().manual_seed(first + i)
        torch.rand(4, generator=generator)
        assert torch.equal(numbers, torch.rand(4, generator=generator))


def test_uneven_batches_in_every_split(split: ms.Strategy) -> None:
    pair = Pair(split)
    pair.train(plain_step, steps=4)


def test_replicas_run_in_order_one_at_a_time(split: ms.Strategy) -> None:
    events: list[tuple[str, int]] = []

    def step() -> None:
        events.append(("before", replica_id()))
        context = ms.get_replica_context()
        assert context is not None
        context.merge_call(lambda strategy: events.append(("merged", -1)))
        events.append(("after", replica_id()))

    split.run(step)
    ids = [split.extended.first_replica_id + i for i in range(split.extended.num_local_replicas)]
    assert events == [
        *(("before", i) for i in ids),
        ("merged", -1),
        *(("after", i) for i in ids),
    ]


@pytest.mark.parametrize(
    ("mode", "read"),
    [
        (torch.no_grad, torch.is_grad_enabled),
        (torch.enable_grad, torch.is_grad_enabled),
        (torch.inference_mode, torch.is_inference_mode_enabled),
        (lambda: torch.device("meta"), lambda: torch.ones(1).device),
        (
            lambda: torch.autocast("cpu", dtype=torch.bfloat16),
            lambda: (torch.ones(2, 2) @ torch.ones(2, 2)).dtype,
        ),
    ],
)
def test_threads_inherit_the_programs_modes(
    split: ms.Strategy, mode: Callable[[], Any], read: Callable[[], Any]
) -> None:
    with mode():
        expected = read()
        seen = []
        split.run(lambda: seen.append(read()))
    assert seen == [expected] * split.extended.num_local_replicas
    seen.clear()
    split.run(lambda: seen.append(read()))
    assert seen == [read()] * split.extended.num_local_replicas


def test_threads_inherit_context_variables(split: ms.Strategy) -> None:
    variable = contextvars.ContextVar("variable", default="default")
    token = variable.set("program")
    seen = []

    def step() -> None:
        seen.append(variable.get())
        if replica_id() > 0:
            variable.set(f"replica {replica_id()}")

    split.run(step)
    variable.reset(token)
    assert seen == ["program"] * split.extended.num_local_replicas


def test_modes_of_one_replica_do_not_reach_another(split: ms.Strategy) -> None:
    """Also when they change turns inside a mode."""
    seen = []

    def step() -> None:
        with torch.set_grad_enabled(replica_id() % 2 == 0):
            context = ms.get_replica_context()
            assert context is not None
            context.all_reduce("sum", torch.ones(1))
            seen.append(torch.is_grad_enabled() == (replica_id() % 2 == 0))

    split.run(step)
    assert seen == [True] * split.extended.num_local_replicas


def test_evaluation_in_inference_mode_then_training(split: ms.Strategy) -> None:
    model = build(split, dropout_and_batch_norm).eval()
    x, y = next(batches())
    x, y = torch.cat([x, x]), torch.cat([y, y])
    with torch.inference_mode():
        outputs = split.experimental_local_results(split.run(lambda: model(own(x))))
        for i, output in enumerate(outputs):
            part = x.tensor_split(split.num_replicas_in_sync)[split.extended.first_replica_id + i]
            torch.testing.assert_close(output, model(part))
    model.train()
    torch.manual_seed(1)
    simulated = Simulated(model, split.num_replicas_in_sync)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    split.run(lambda: plain_step(model, optimizer, own(x), own(y)))
    simulated.step(x, y)
    check_like_simulated(model, simulated)


def test_schedulers_in_run_name_the_fix(split: ms.Strategy) -> None:
    optimizer = torch.optim.SGD(build(split).parameters(), lr=0.1)
    schedulers: list[Any] = [
        torch.optim.lr_scheduler.StepLR(optimizer, 1),
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
    ]
    optimizer.step()
    for scheduler in schedulers:
        arguments = (1.0,) if "Plateau" in type(scheduler).__name__ else ()
        if split.extended.num_local_replicas > 1:
            with pytest.raises(RuntimeError, match=r"step\(\) inside run .* call it after run"):
                split.run(scheduler.step, args=arguments)
        scheduler.step(*arguments)


def test_gradient_scalers_in_run_name_the_fix(split: ms.Strategy) -> None:
    pair = Pair(split)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    x, y = next(pair.batches)
    calls: list[Callable[[], Any]] = [
        lambda: scaler.step(pair.optimizer),
        scaler.update,
        lambda: scaler.unscale_(pair.optimizer),
    ]
    if split.extended.num_local_replicas > 1:
        for call in calls:
            with pytest.raises(RuntimeError, match=r"GradScaler\.\w+\(\) inside run .*after run"):
                split.run(call)
    split.run(lambda: scaler.scale(loss_of(pair.model(own(x)), own(y))).backward())
    scaler.step(pair.optimizer)
    scaler.update()
    plain_step(pair.alone, pair.optimizer_alone, x, y)
    assert_same_parameters(pair.model, pair.alone)


def test_closures_in_run_name_the_fix(split: ms.Strategy) -> None:
    optimizer = torch.optim.SGD(build(split).parameters(), lr=0.1)
    if split.extended.num_local_replicas > 1:
        with pytest.raises(RuntimeError, match=r"step\(closure\) inside run"):
            split.run(lambda: optimizer.step(lambda: 0.0))


def test_backward_in_run_and_the_rest_after_it(split: ms.Strategy) -> None:
    """Clip, step and zero_grad at top level, where replica 0's gradients are."""
    pair = Pair(split)

    def backward_only(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        loss_of(model(x), y).backward()

    for set_to_none in (True, False, True, False):
        pair.step(backward_only)
        for model, optimizer in (
            (pair.model, pair.optimizer),
            (pair.alone, pair.optimizer_alone),
        ):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            optimizer.step()
        pair.check()
        norms = split.run(lambda: torch.stack([p.grad.norm() for p in pair.model.parameters()]))
        for norm in split.experimental_local_results(norms):
            expected = torch.stack([p.grad.norm() for p in pair.alone.parameters()])
            torch.testing.assert_close(norm, expected)
        pair.optimizer.zero_grad(set_to_none=set_to_none)
        pair.optimizer_alone.zero_grad(set_to_none=set_to_none)
    pair.train(plain_step)


def test_an_exception_of_one_replica(split: ms.Strategy) -> None:
    pair = Pair(split)
    pair.train(plain_step, steps=1)
    last = split.extended.first_replica_id + split.extended.num_local_replicas - 1
    for failing in (split.extended.first_replica_id, last):

        def step(failing: int = failing) -> None:
            if replica_id() == failing:
                raise ArithmeticError(f"replica {failing}")

        with pytest.raises(ArithmeticError, match=f"replica {failing}"):
            split.run(step)
    pair.train(plain_step)


def test_replicas_that_meet_unequally_often(split: ms.Strategy) -> None:
    pair = Pair(split)
    x, y = next(pair.batches)
    if split.extended.num_local_replicas == 1:
        return
    first = split.extended.first_replica_id

    def step(skipping: int) -> None:
        loss = loss_of(pair.model(own(x)), own(y))
        if replica_id() != skipping:
            loss.backward()

    for skipping in (first, first + 1):
        with pytest.raises(RuntimeError, match=r"replicas must call merge_call .* equally often"):
            split.run(step, args=(skipping,))
    pair.optimizer.zero_grad()
    pair.train(plain_step)


def test_a_dropped_strategy_leaves_nothing_behind() -> None:
    before = set(threading.enumerate())
    strategy = ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"], gradients="sum")
    pair = Pair(strategy, small_net)
    pair.train(plain_step, steps=1)
    (thread,) = set(threading.enumerate()) - before
    gone = [weakref.ref(strategy), weakref.ref(pair.model), weakref.ref(strategy.extended)]
    del strategy, pair
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3
    thread.join(timeout=30)
    assert not thread.is_alive()
