"""Parameters that a program writes itself, with two replicas in a rank: once for both, or an error."""

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import mpistrat as ms
from support.training.whole_batch import FEATURES, Pair, build, own, replica_id, small_net

Update = Callable[[torch.nn.Module], Any]

LR = 0.01


@pytest.fixture
def two() -> ms.Strategy:
    """Two replicas per rank."""
    return ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"], gradients="sum")


def gradients(model: torch.nn.Module) -> list[Any]:
    return [parameter.grad for parameter in model.parameters()]


def through_data(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data.add_(parameter.grad, alpha=-LR)


@torch.no_grad()
def in_place(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter -= LR * parameter.grad


@torch.no_grad()
def for_each(model: torch.nn.Module) -> None:
    torch._foreach_add_(list(model.parameters()), gradients(model), alpha=-LR)


def for_each_data(model: torch.nn.Module) -> None:
    torch._foreach_add_([p.data for p in model.parameters()], gradients(model), alpha=-LR)


def other_data(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.data - LR * parameter.grad


def same_data(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data -= LR * parameter.grad  # type: ignore[operator]


def detached(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.detach().view(-1).sub_(LR * parameter.grad.view(-1))  # type: ignore[union-attr]


def as_vector(model: torch.nn.Module) -> None:
    vector = parameters_to_vector(model.parameters())
    vector_to_parameters(
        vector - LR * parameters_to_vector(gradients(model)), list(model.parameters())
    )


BY_HAND = [
    *(through_data, in_place, for_each, for_each_data),
    *(other_data, same_data, detached, as_vector),
]


def step_with(update: Update) -> Callable[..., Any]:
    def step(model: torch.nn.Module, _: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        model.zero_grad()
        (model(x) - y).square().sum().backward()
        update(model)

    return step


@pytest.mark.parametrize("update", BY_HAND)
def test_what_would_count_twice_is_an_error(two: ms.Strategy, update: Update) -> None:
    pair = Pair(two)
    with pytest.raises(
        RuntimeError, match=r"parameter Sequential.0.weight, of shape \[5, 4\], was .*merge_call"
    ):
        pair.step(step_with(update))


@pytest.mark.parametrize("update", BY_HAND)
def test_one_replica_writes_as_it_likes(one_per_rank: ms.Strategy, update: Update) -> None:
    Pair(one_per_rank).train(step_with(update))


def test_a_write_for_all_replicas_counts_once(two: ms.Strategy) -> None:
    def in_merge_call(model: torch.nn.Module) -> None:
        context = ms.get_replica_context()
        assert context is not None
        if ms.has_strategy():
            context.merge_call(lambda strategy: through_data(model))
        else:
            through_data(model)

    def by_the_first(model: torch.nn.Module) -> None:
        if replica_id() % 2 == 0:
            through_data(model)

    for update in (in_merge_call, by_the_first):
        Pair(two).train(step_with(update))


def test_what_twice_is_as_once(two: ms.Strategy) -> None:
    """Weights are clipped after the optimizer's step, and loaded."""

    def step(model: torch.nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        step_with(lambda _: optimizer.step())(model, optimizer, x, y)
        for parameter in model.parameters():
            parameter.data.clamp_(-0.2, 0.2)
        model.load_state_dict({name: 0.9 * value for name, value in weights.items()})

    torch.manual_seed(0)
    weights = {name: value.double() for name, value in small_net().state_dict().items()}
    Pair(two).train(step)


def test_embeddings_renormalize_the_rows_that_they_look_up(two: ms.Strategy) -> None:
    with two.scope():
        table = torch.nn.Embedding(8, 2, max_norm=0.1)
    two.run(lambda: table(torch.tensor([2 * replica_id() % 8, 7])).sum().backward())
    assert table.weight[7].norm() < 0.101


def test_parameters_that_are_no_modules(two: ms.Strategy) -> None:
    weight = torch.ones(3, requires_grad=True)
    two.mirror(weight)

    def step() -> None:
        (2 * weight).sum().backward()
        weight.data -= weight.grad  # type: ignore[operator]

    with pytest.raises(RuntimeError, match="parameter 0, of shape"):
        two.run(step)


def test_a_view_that_was_taken_before(two: ms.Strategy) -> None:
    """It goes on being the parameter's memory; so does what `.data` is after the parameter was moved."""
    model = build(two)
    two.run(lambda: None)
    weight, data = model[0].weight, model[0].weight.data
    data.fill_(2.0)
    assert (weight == 2).all()
    assert data.data_ptr() == weight.data_ptr()
    with pytest.raises(RuntimeError, match=r"Sequential.0.weight"):
        two.run(lambda: data.add_(1.0))
    two.run(model.half)
    assert weight.data.dtype is torch.float16
    weight.data.zero_()
    assert not weight.any()


def test_who_watches_keeps_no_model(two: ms.Strategy) -> None:
    model = build(two)
    two.run(functools.partial(getattr, model[0].weight, "data"))
    memory = weakref.ref(model[0].weight.untyped_storage())
    parameter = weakref.ref(model[0].weight)
    del model
    gc.collect()
    assert parameter() is None
    assert memory() is None


def test_a_disabled_scaler_passes(two: ms.Strategy) -> None:
    """`GradScaler("cuda", enabled=False)` only calls the optimizer's step; one that scales is refused."""

    def step(model: torch.nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale((model(x) - y).square().sum() / FEATURES).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    scaler = torch.amp.GradScaler("cuda", enabled=False)  # type: ignore[attr-defined]
    pair = Pair(two)
    pair.train(step)
    scaler = torch.amp.GradScaler("cpu")  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match=r"unscale_.* inside run would happen once for each"):
        pair.strategy.run(lambda: step(pair.model, pair.optimizer, *map(own, next(pair.batches))))


def test_averaged_models_are_updated_after_run(two: ms.Strategy) -> None:
    model = build(two)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    with pytest.raises(RuntimeError, match=r"update_parameters.* call it after run"):
        two.run(lambda: averaged.update_parameters(model))
    averaged.update_parameters(model)
    assert averaged.n_averaged == 1
