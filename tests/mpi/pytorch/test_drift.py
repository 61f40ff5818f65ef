"""What would make ranks drift apart in silence is an error on all of them, or is said once."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch.utils.data import DataLoader, TensorDataset

import mpistrat as ms
from support.rank_errors import assert_usable, errors_of_ranks

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
LAST = SIZE - 1
several = pytest.mark.mpi(min_size=2)


@pytest.fixture
def strategy() -> ms.Strategy:
    return ms.MultiWorkerMirroredStrategy()


def net() -> torch.nn.Sequential:
    torch.manual_seed(3)
    layers = torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)
    return torch.nn.Sequential(*layers).double()


def examples(step: int = 0, count: int = 6 * SIZE) -> torch.Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(step)).double()


def backward(model: torch.nn.Module, x: torch.Tensor) -> None:
    model.zero_grad()
    model(x).square().mean().backward()


def loader(count: int, batch: int, seed: int = 0) -> DataLoader:
    return DataLoader(TensorDataset(examples(seed, count)), batch)


def raised_everywhere(call: Callable[[], Any], *texts: str) -> None:
    errors = errors_of_ranks(call)
    for name, message, _ in errors:
        assert name in ("RuntimeError", "CollectiveMismatchError"), errors
        assert all(text in message for text in texts), errors


# Ranks that are not in the same step


@several
def test_a_rank_that_skips_a_step_of_its_shards(strategy: ms.Strategy) -> None:
    def loop() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for t in range(4):
            x = strategy.shard(examples(t))
            if t == 2 and RANK == LAST:
                continue
            backward(model, x)
            optimizer.step()

    with strategy.replica():
        model = strategy.prepare(net())
        counts = f"rank 0: run 0, 2 steps, shard {3 + (LAST == 0)}", "run 0, 2 steps, shard 4"
        raised_everywhere(loop, "a rank has skipped a backward", *counts)
    assert_usable(strategy)


def test_shards_that_one_rank_alone_may_take(strategy: ms.Strategy) -> None:
    """Evaluations, on whatever ranks, and what is outside `replica()`."""
    with strategy.replica():
        model = strategy.prepare(net())
        if RANK == 0:
            with torch.no_grad():
                strategy.shard(examples())
        backward(model, strategy.shard(examples()))
    if RANK == 0:
        strategy.shard(examples())
    with strategy.replica():
        backward(model, strategy.shard(examples(1)))
    expected = net()
    backward(expected, examples(1))
    torch.testing.assert_close(model[0].weight.grad, expected[0].weight.grad)


# Parameters that are frozen


@several
@pytest.mark.parametrize("step", [0, 2])
def test_parameters_that_one_rank_has_frozen(strategy: ms.Strategy, step: int) -> None:
    def loop() -> None:
        for t in range(3):
            if t == step and RANK == LAST:
                model[0].requires_grad_(False)
            backward(model, strategy.shard(examples(t)))

    with strategy.replica():
        model = strategy.prepare(net())
        named = f"rank {LAST} has frozen", "such as Sequential.0.weight, Sequential.0.bias. It"
        raised_everywhere(loop, *named, "on every rank alike")
        model[0].requires_grad_(True)
        backward(model, strategy.shard(examples()))
    expected = net()
    backward(expected, examples())
    torch.testing.assert_close(model[0].weight.grad, expected[0].weight.grad)


@several
def test_parameters_that_one_rank_has_unfrozen(strategy: ms.Strategy) -> None:
    with strategy.replica():
        model = net()
        model[0].requires_grad_(False)
        strategy.prepare(model)
        backward(model, strategy.shard(examples()))
        if RANK == 0:
            model[0].requires_grad_(True)
        raised_everywhere(
            lambda: backward(model, strategy.shard(examples())), "Sequential.0.weight"
        )


def test_parameters_that_ranks_may_leave_out(strategy: ms.Strategy) -> None:
    """Frozen on all ranks, unused on some, and dropped by some together with a model that was frozen."""
    with strategy.replica():
        model = strategy.prepare(net())
        teacher: Any = net().requires_grad_(False)
        strategy.prepare(teacher)
        for t in range(3):
            model[2].requires_grad_(t != 1)
            model.zero_grad()
            x = strategy.shard(examples(t))
            loss = (model(x) - teacher(x)).square().mean()
            if RANK == LAST and t != 1:  # another head
                loss = model[2](model[1](x[:, :1].expand(-1, 5))).mean()
            loss.backward()
        teacher = None if RANK == LAST else teacher
        backward(model, strategy.shard(examples()))
    expected = net()
    backward(expected, examples())
    torch.testing.assert_close(model[0].weight.grad, expected[0].weight.grad)


def test_parameters_that_become_frozen_and_used(strategy: ms.Strategy) -> None:
    """Frozen on all ranks while none used them is right; on one rank it is found when another uses them."""

    def loss(uses: bool) -> torch.Tensor:
        return body(x).mean() + (head(x).mean() if uses else 0)

    with strategy.replica():
        body, head = strategy.prepare(torch.nn.Linear(4, 1).double(), net())
        x = strategy.shard(examples())
        loss(False).backward()
        head[0].requires_grad_(False)
        loss(RANK == 0).backward()
        head[0].requires_grad_(RANK == 0)
        if SIZE > 1:
            raised_everywhere(lambda: loss(True).backward(), "such as Sequential.0.weight")


# Updates inside backward()


@torch.no_grad()
def adds(parameter: torch.Tensor) -> None:
    parameter.add_(parameter.grad, alpha=-0.1)


@torch.no_grad()
def adds_and_drops(parameter: torch.Tensor) -> None:
    parameter.add_(parameter.grad, alpha=-0.1)
    parameter.grad = None


def adds_to_data(parameter: torch.Tensor) -> None:
    parameter.data.add_(parameter.grad, alpha=-0.1)


def adds_to_data_and_drops(parameter: torch.Tensor) -> None:
    adds_to_data(parameter)
    parameter.grad = None


def drops(parameter: torch.Tensor) -> None:
    parameter.grad = None


UPDATES = [adds, adds_and_drops, adds_to_data, adds_to_data_and_drops, drops]


def hook_into(model: torch.nn.Module, hook: Callable[[torch.Tensor], None]) -> None:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)


@several
@pytest.mark.parametrize("before", [False, True], ids=["hooked after", "hooked before"])
@pytest.mark.parametrize("update", UPDATES)
def test_an_update_inside_backward(
    strategy: ms.Strategy, update: Callable[[torch.Tensor], None], before: bool
) -> None:
    """Whether the hook is there before the module is prepared, or comes later."""
    model = net()
    with strategy.replica():
        if before:
            hook_into(model, update)
        strategy.prepare(model)
        if not before:
            hook_into(model, update)
        texts = "parameter Sequential.", "inside backward()", "Update parameters after backward()"
        raised_everywhere(lambda: backward(model, strategy.shard(examples())), *texts)
    assert_usable(strategy)


@several
def test_an_update_of_all_parameters_by_the_hook_of_one() -> None:
    """As LOMO does it. With gradients that leave in buckets, too."""
    options = ms.CommunicationOptions(overlap=True)
    strategy = ms.MultiWorkerMirroredStrategy(communication_options=options)

    def update(gradient: torch.Tensor) -> torch.Tensor:
        for parameter in model.parameters():
            if parameter.grad is not None:
                adds_to_data_and_drops(parameter)
        return gradient

    with strategy.replica():
        model = strategy.prepare(net())
        for t in range(3):  # after which it is known what leaves
            backward(model, strategy.shard(examples(t)))
        for parameter in model.parameters():
            parameter.register_hook(update)
            parameter.register_post_accumulate_grad_hook(lambda parameter: None)
        raised_everywhere(lambda: backward(model, strategy.shard(examples())), "inside backward()")
    assert_usable(strategy)


@several
@pytest.mark.parametrize("kind", ["another's hook", "late", "of a module", "of a node"])
def test_updates_by_other_hooks(strategy: ms.Strategy, kind: str) -> None:
    with strategy.replica():
        model: Any = strategy.prepare(net())

        @torch.no_grad()
        def update(*_: Any) -> None:
            weight = model[0].weight
            (weight if kind == "another's hook" else weight.data).sub_(0.1)

        backward(model, strategy.shard(examples()))
        if kind == "of a module":
            model[2].register_full_backward_hook(update)
        elif kind == "of a node":
            bias = model[2].bias
            node = bias.view_as(bias).grad_fn.next_functions[0][0]
            node.register_hook(update)
        else:
            model[2].bias.register_post_accumulate_grad_hook(update)
        texts = "parameter Sequential.0.weight was changed inside backward()", "after backward()"
        raised_everywhere(lambda: backward(model, strategy.shard(examples(1))), *texts)


def test_hooks_that_may_stay(strategy: ms.Strategy) -> None:
    """Those that look, or replace a gradient; and any inside `no_sync()`."""
    norms = []

    def logs(parameter: torch.Tensor) -> None:
        norms.append(float(parameter.grad.norm()) + float(parameter.data.norm()))
        parameter.grad = parameter.grad.clone()

    before = vars(torch.nn.Parameter).get("data")
    with strategy.replica():
        model = strategy.prepare(net())
        hook_into(model, logs)
        backward(model, strategy.shard(examples()))
        expected = net()
        backward(expected, examples())
        torch.testing.assert_close(model[0].weight.grad, expected[0].weight.grad)
        hook_into(model, adds_and_drops)
        with strategy.no_sync():
            backward(model, strategy.shard(examples()))
    assert len(norms) == 8
    assert vars(torch.nn.Parameter).get("data") is before


# Modules that are made inside run


@several
def test_a_module_that_is_made_in_run(strategy: ms.Strategy) -> None:
    made: dict[str, Any] = {}

    def step() -> None:
        made["model"] = made.get("model") or net()
        backward(made["model"], examples(RANK))

    raised_everywhere(lambda: strategy.run(step), "Linear.", "made inside run", "in strategy.scope")
    # Once it is mirrored it is as any other.
    strategy.mirror(made["model"])
    strategy.extended.modules.parts.rule.ask_for("mean", "the test", warn=False)
    strategy.run(step)
    total = sum(examples(rank).sum() for rank in range(SIZE))
    assert total.isfinite()
    gradients = strategy.gather(made["model"][0].weight.grad[None], axis=0)
    assert (gradients == gradients[0]).all()


def test_modules_that_may_be_made_anywhere(strategy: ms.Strategy) -> None:
    """In `replica()`, where whole programs live; copies of mirrored ones in run; and what no backward reaches."""
    with strategy.replica():
        model = strategy.prepare(net())
        backward(net(), examples())
        backward(model, strategy.shard(examples()))

    def step() -> None:
        learner = copy.deepcopy(model)
        backward(learner, examples(RANK))
        (inner,) = torch.autograd.grad(net()(examples()).sum(), learner[2].bias, allow_unused=True)
        assert inner is None

    strategy.run(step)


# By which step a loss counts


def train(model: torch.nn.Module, batches: Any, others: Any, by_hand: bool = False) -> Any:
    """Two backwards of each step; between them an example of `others` is looked at."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    looked_at = iter(others)
    for i, (x,) in enumerate(batches):
        backward(model, x)
        optimizer.step()
        if i < 2:
            with torch.no_grad():
                model(next(looked_at)[0])
        model.zero_grad()
        losses = model(x).abs().flatten()
        (ms.compute_average_loss(losses) if by_hand else losses.mean()).backward()
        optimizer.step()
    return model


def assert_equal(model: torch.nn.Module, expected: torch.nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


UNEVEN = 2 * SIZE + 1


def test_a_validation_batch_between_two_backwards(
    strategy: ms.Strategy, notices: list[str]
) -> None:
    data, validation = loader(2 * UNEVEN, UNEVEN), loader(2 * SIZE + 2, SIZE + 1, 1)
    with strategy.replica():
        model = train(*strategy.prepare(net(), data, validation))
    assert_equal(model, train(net(), data, validation))
    assert not [text for text in notices if text.startswith("backward")]


def test_a_loss_that_asks_for_the_step_after_a_validation_batch(strategy: ms.Strategy) -> None:
    """`compute_average_loss` and `step_examples` are of the training's step where gradients are on."""
    data = strategy.experimental_distribute_dataset(loader(UNEVEN, UNEVEN))
    # A validation batch whose parts are as long here, and another in all.
    validation = strategy.experimental_distribute_dataset(loader(2 * SIZE, 2 * SIZE, 1))
    (x,) = next(of_training := iter(data))
    with torch.no_grad():
        (y,) = next(of_validation := iter(validation))
        of_no_gradient = strategy.step_examples
    losses = strategy.run(lambda: ms.compute_average_loss(torch.ones(len(x), requires_grad=True)))
    assert strategy.step_examples == (len(x), UNEVEN)
    assert of_no_gradient == (len(y), 2 * SIZE)
    assert float(strategy.reduce("sum", losses.detach(), None)) == pytest.approx(1.0)
    assert next(of_training, None) is next(of_validation, None) is None


@several
def test_steps_of_two_loaders_at_a_time(strategy: ms.Strategy, notices: list[str]) -> None:
    def loop(model: Any, first: Any, second: Any) -> None:
        for (x,), (y,) in zip(first, second, strict=True):
            model.zero_grad()
            (model(x).mean() + model(y).mean()).backward()

    with strategy.replica():
        model, equal, equal_too = strategy.prepare(net(), loader(9, 3), loader(9, 3, 1))
        loop(model, equal, equal_too)
        uneven = strategy.prepare(loader(3 * UNEVEN, UNEVEN, 1))
        text = f"steps of {sorted([3, UNEVEN])} examples before it"
        if UNEVEN != 3:
            model.zero_grad()
            raised_everywhere(lambda: loop(model, equal, uneven), text, "torch.no_grad()")
            assert model[0].weight.grad is None  # the engine has not run
    assert not [text for text in notices if text.startswith("backward")]
    assert_usable(strategy)


def test_two_loaders_in_turn(strategy: ms.Strategy, notices: list[str]) -> None:
    def loop(model: Any, first: Any, second: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        others = iter(second)
        for (x,) in first:
            backward(model, x)
            optimizer.step()
            backward(model, next(others)[0])
            optimizer.step()
        return model

    loaders = loader(3 * UNEVEN, UNEVEN), loader(9, 3, 1)
    with strategy.replica():
        model = loop(*strategy.prepare(net(), *loaders))
    assert_equal(model, loop(net(), *loaders))
    assert not [text for text in notices if text.startswith("backward")]


def test_a_validation_that_is_held_and_has_ended(strategy: ms.Strategy) -> None:
    """Without `torch.no_grad()`; its iterator is still there when the training goes on."""

    def loop(model: Any, batches: Any, validation: Any) -> Any:
        for (x,) in batches:
            others = iter(validation)
            while next(others, None) is not None:
                pass
            backward(model, x)
        return model

    loaders = loader(UNEVEN, UNEVEN), loader(3 * SIZE, SIZE + 1, 1)
    with strategy.replica():
        model = loop(*strategy.prepare(net(), *loaders))
    expected = loop(net(), *loaders)
    torch.testing.assert_close(model[0].weight.grad, expected[0].weight.grad)


def test_an_evaluation_before_the_training(strategy: ms.Strategy, notices: list[str]) -> None:
    """Without `torch.no_grad()`, and held; the training then goes by a loader, or by `shard`."""

    def loop(model: Any, batches: Any, evaluated: Any, whole: torch.Tensor) -> Any:
        for data in (batches, [(whole,)]):
            others = iter(evaluated)
            while next(others, None) is not None:
                pass
            for (x,) in data:
                backward(model, strategy.shard(x) if data is not batches and in_block else x)
        return model

    loaders, in_block = (loader(UNEVEN, UNEVEN), loader(3 * SIZE, SIZE + 1, 1)), True
    with strategy.replica():
        model = loop(*strategy.prepare(net(), *loaders), examples(2))
    in_block = False
    expected = loop(net(), *loaders, examples(2))
    torch.testing.assert_close(model[0].weight.grad, expected[0].weight.grad)
    assert not [text for text in notices if text.startswith("backward")]


def test_a_loss_of_sharded_noise_between_steps(strategy: ms.Strategy) -> None:
    """As a GAN's: its size is not that of the loader's step, which is uneven."""

    def loop(model: Any, batches: Any, part: Callable[[Any], Any]) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for (x,) in batches:
            backward(model, x)
            optimizer.step()
            noise = part(examples(5, 4 * SIZE))
            for _ in range(2):
                backward(model, noise)
                optimizer.step()
        return model

    with strategy.replica():
        model, batches = strategy.prepare(net(), loader(2 * UNEVEN, UNEVEN))
        loop(model, batches, strategy.shard)
    assert_equal(model, loop(net(), loader(2 * UNEVEN, UNEVEN), lambda noise: noise))


@several
@pytest.mark.parametrize("collect", [list, iter])
def test_a_backward_after_the_end(
    strategy: ms.Strategy, notices: list[str], collect: Callable[[Any], Any]
) -> None:
    """Of a step that is kept, or of the sum of all."""
    with strategy.replica():
        model, batches = strategy.prepare(net(), loader(2 * UNEVEN + 2, UNEVEN))
        losses = [model(x).mean() for (x,) in collect(batches)]
        sum(losses).backward()
    said_once = [text for text in notices if "in an iteration that is over" in text]
    assert len(said_once) == (RANK == 0)


@several
def test_a_program_that_reads_ahead_is_told(strategy: ms.Strategy, notices: list[str]) -> None:
    def loop(batches: Any) -> None:
        iterator = iter(batches)
        (x,) = next(iterator)
        for (following,) in iterator:
            backward(model, x)
            x = following

    with strategy.replica():
        model, batches, full = strategy.prepare(
            net(),
            loader(9 * SIZE, 3 * SIZE),
            DataLoader(loader(9, 3).dataset, SIZE, drop_last=True),
        )
        loop(full)
        assert not [text for text in notices if "several steps before" in text]
        loop(batches)
        loop(batches)
    said_once = [text for text in notices if "several steps before the first backward()" in text]
    assert len(said_once) == (RANK == 0)


@several
def test_a_training_step_that_is_read_without_gradients(
    strategy: ms.Strategy, notices: list[str]
) -> None:
    with strategy.replica():
        model, batches = strategy.prepare(net(), loader(UNEVEN, UNEVEN))
        with torch.no_grad():
            (x,) = next(iter(batches))
        backward(model, x)
        backward(model, x)
    assert len([text for text in notices if "inside torch.no_grad()" in text]) == (RANK == 0)


# Data that every rank reads whole, or makes itself


def of_a_loader(strategy: ms.Strategy) -> torch.Tensor:
    return next(iter(strategy.prepare(loader(6 * SIZE, 6 * SIZE))))[0]


def of_shard(strategy: ms.Strategy) -> torch.Tensor:
    return strategy.shard(examples())


def of_a_function(strategy: ms.Strategy) -> Any:
    def make(context: Any) -> torch.Tensor:
        return examples(context.replica_id_in_sync_group)

    return strategy.experimental_distribute_values_from_function(make)


@pytest.mark.parametrize("read", [of_a_loader, of_shard, of_a_function, None])
def test_a_program_that_distributes_nothing_is_told(
    strategy: ms.Strategy, notices: list[str], read: Callable[[ms.Strategy], Any] | None
) -> None:
    with strategy.replica():
        model = strategy.prepare(net())
        for _ in range(2):
            backward(model, examples(RANK) if read is None else read(strategy))
    said_once = [text for text in notices if "no batch was sharded" in text]
    assert len(said_once) == (RANK == 0 and SIZE > 1 and read is None)
    assert all("as in reinforcement learning" in text for text in said_once)


@pytest.mark.parametrize("kind", [torch.as_tensor, np.asarray])
@pytest.mark.parametrize("seeded", [True, False])
def test_shards_of_arrays_that_differ(
    strategy: ms.Strategy, notices: list[str], seeded: bool, kind: Callable[[Any], Any]
) -> None:
    with strategy.replica():
        model = strategy.prepare(net())
        for t in range(2):
            whole = examples(t if seeded else RANK), torch.zeros(6 * SIZE, 0)
            x, _ = strategy.shard(tuple(map(kind, whole)))
            backward(model, torch.as_tensor(x))
    said_once = [text for text in notices if "the ranks have given it different arrays" in text]
    assert len(said_once) == (RANK == 0 and SIZE > 1 and not seeded)


def test_replicas_that_take_turns_inside_backward() -> None:
    """What watches `.data` while one of them computes is gone afterwards."""
    strategy = ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"], gradients="mean")
    with strategy.scope():
        norm = torch.nn.BatchNorm1d(5)
        model = ms.convert_sync_batchnorm(torch.nn.Sequential(torch.nn.Linear(4, 5), norm))
    model[0].weight.register_hook(lambda gradient: None)
    x = examples().float()
    before = vars(torch.nn.Parameter)["data"]
    for _ in range(3):
        strategy.run(lambda: backward(model, x))
    assert vars(torch.nn.Parameter)["data"] is before
