"""Which backwards are reduced, by which rule, which are refused, and what a failed one leaves."""

import copy
from typing import Any

import pytest
import torch

import mpistrat as ms
from mpistrat.errors import CollectiveMismatchError
from support.training.whole_batch import (
    BATCH,
    Pair,
    assert_same_gradient,
    batches,
    build,
    in_run,
    loss_of,
    own,
    plain_step,
    small_net,
)


def test_an_exception_in_the_middle_of_a_backward(strategy: ms.Strategy) -> None:
    """Caught by every replica: what the failed backward had added is gone, the next step is right."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("in the middle")

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        hidden = Fails.apply(model[1](model[0](x)))
        with pytest.raises(ArithmeticError, match="in the middle"):
            loss_of(model[2](hidden), y).backward()
        if model is pair.model and strategy.num_replicas_in_sync > 1:
            before = [p.grad for p in model.parameters()]
            assert before == gradients
        plain_step(model, optimizer, x, y)

    pair = Pair(strategy)
    for _ in range(2):
        gradients = [None] * 4
        pair.train(step, steps=1)
        pair.optimizer.zero_grad()
        pair.optimizer_alone.zero_grad()


def test_failed_backwards_keep_what_was_accumulated(strategy: ms.Strategy) -> None:
    def failing_hook(gradient: torch.Tensor) -> None:
        raise ArithmeticError

    def accumulate(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        loss_of(model(x), y).backward()
        if in_run():
            output = model(x)
            output.register_hook(failing_hook)
            with pytest.raises(ArithmeticError):
                loss_of(output, y).backward()

    pair = Pair(strategy)
    pair.train(accumulate)


# Steps of shared parameters are collective themselves: there the ranks differ already.
SKIPPED = r"a rank has skipped a backward|before optimizer\.step\(\) of shared parameters"


def step_that_may_skip_backward(pair: Pair, skips: bool) -> None:
    x, y = (own(t) for t in next(batches()))
    pair.optimizer.zero_grad()
    loss = loss_of(pair.model(x), y)
    if not skips:
        loss.backward()
    pair.optimizer.step()


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_skips_a_backward_and_calls_reduce(strategy: ms.Strategy) -> None:
    pair = Pair(strategy)
    skips = strategy.extended.communicator.rank == 1
    with pytest.raises(CollectiveMismatchError, match="gradients of mirrored parameters"):  # noqa: PT012
        strategy.run(step_that_may_skip_backward, args=(pair, skips))
        strategy.reduce("sum", torch.ones(3), axis=None)


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_skips_a_backward_and_goes_on(strategy: ms.Strategy) -> None:
    pair = Pair(strategy)
    skips = strategy.extended.communicator.rank == 1
    with pytest.raises(CollectiveMismatchError, match=SKIPPED):  # noqa: PT012
        strategy.run(step_that_may_skip_backward, args=(pair, skips))
        strategy.run(step_that_may_skip_backward, args=(pair, False))


def test_create_graph_is_refused(strategy: ms.Strategy) -> None:
    pair = Pair(strategy)
    x, y = next(pair.batches)

    def step() -> None:
        loss_of(pair.model(own(x)), own(y)).backward(create_graph=True)

    if strategy.num_replicas_in_sync > 1:
        with pytest.raises(RuntimeError, match=r"create_graph=True.*Use torch\.autograd\.grad"):
            strategy.run(step)
    pair.train(plain_step)


@pytest.mark.parametrize("gradients", ["sum", "mean"])
def test_sum_and_mean(gradients: str) -> None:
    strategy = ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"], gradients=gradients)
    pair = Pair(strategy)
    replicas = strategy.num_replicas_in_sync
    factor = replicas if gradients == "mean" else 1

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        optimizer.zero_grad()
        (loss_of(model(x), y) * (factor if in_run() else 1)).backward()
        optimizer.step()

    pair.train(step)


def test_the_rule_must_be_known() -> None:
    strategy = ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"])
    pair = Pair(strategy)
    with pytest.raises(RuntimeError, match=r'compute_average_loss.*gradients="mean"'):
        pair.step(plain_step)

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        optimizer.zero_grad()
        losses = (model(x) - y).square().sum(1)
        loss = ms.compute_average_loss(losses, global_batch_size=BATCH) if in_run() else None
        (losses.mean() if loss is None else loss).backward()
        optimizer.step()

    pair.train(step)


def test_backward_outside_run_is_refused(strategy: ms.Strategy) -> None:
    pair = Pair(strategy)
    x, y = next(pair.batches)
    if strategy.num_replicas_in_sync > 1:
        with pytest.raises(RuntimeError, match=r"backward.* outside run .*inside strategy\.run"):
            loss_of(pair.model(x), y).backward()
        pair.optimizer.zero_grad()
    pair.train(plain_step)


def test_autograd_grad_is_not_reduced(strategy: ms.Strategy) -> None:
    """It returns this replica's own gradient, and needs an explicit all_reduce."""
    pair = Pair(strategy)
    x, y = next(pair.batches)
    weight = pair.model[0].weight

    def step() -> Any:
        (gradient,) = torch.autograd.grad(loss_of(pair.model(own(x)), own(y)), weight)
        assert weight.grad is None
        context = ms.get_replica_context()
        assert context is not None
        return context.all_reduce(ms.ReduceOp.SUM, gradient)

    results = strategy.experimental_local_results(strategy.run(step))
    (expected,) = torch.autograd.grad(loss_of(pair.alone(x), y), pair.alone[0].weight)
    for result in results:
        torch.testing.assert_close(result, expected)


def test_optimizer_step_in_a_hook_of_backward_is_refused(strategy: ms.Strategy) -> None:
    pair = Pair(strategy)
    if strategy.num_replicas_in_sync == 1:
        return
    last = pair.model[0].weight
    handle = last.register_post_accumulate_grad_hook(lambda parameter: pair.optimizer.step())
    with pytest.raises(RuntimeError, match="hook inside backward"):
        pair.step(plain_step)
    handle.remove()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_a_model_of_a_single_replica_is_left_alone() -> None:
    strategy = ms.OneDeviceStrategy("cpu:0")
    with strategy.scope():
        model = small_net().double()
    x, y = next(batches())
    alone = copy.deepcopy(model)
    loss_of(model(x), y).backward()
    strategy.run(lambda: loss_of(model(x), y).backward(create_graph=True))
    loss_of(alone(x), y).backward()
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert other.grad is not None
        assert_same_gradient(mine.grad.detach(), other.grad * 2, "")  # type: ignore[union-attr]


def test_models_outside_the_scope_may_be_used_in_run(strategy: ms.Strategy) -> None:
    """A frozen teacher, or one replica's own model, is not reduced and not in the way."""
    pair = Pair(strategy)
    own_model = build(ms.OneDeviceStrategy("cpu:0"))

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        plain_step(model, optimizer, x, y)
        own_model.zero_grad()
        loss_of(own_model(x), y).backward()
        assert own_model[0].weight.grad is not None

    pair.train(step)
