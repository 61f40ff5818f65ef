"""Several backwards per step: each adds the reduction of its own contribution once, also with no_sync()."""

from typing import Any

import pytest
import torch

import mpistrat as ms
from support.training.whole_batch import (
    BATCH,
    Pair,
    assert_same_parameters,
    batches,
    build,
    loss_of,
    own,
    plain_step,
    small_net,
)


def no_sync(model: torch.nn.Module, pair: Pair) -> Any:
    """`strategy.no_sync()` for the mirrored model; nothing for the one trained alone."""
    return pair.strategy.no_sync() if model is pair.model else torch.enable_grad()


def test_two_losses_of_one_graph(strategy: ms.Strategy) -> None:
    def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        optimizer.zero_grad()
        output = model(x)
        loss_of(output, y).backward(retain_graph=True)
        loss_of(output.square(), y).backward()
        optimizer.step()

    Pair(strategy).train(step)


def test_accumulation_without_no_sync(strategy: ms.Strategy) -> None:
    def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        optimizer.zero_grad()
        for factor in (1, 2, 3):
            loss_of(model(x * factor), y).backward()
        optimizer.step()

    Pair(strategy).train(step)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_with_no_sync(strategy: ms.Strategy, set_to_none: bool) -> None:
    pair = Pair(strategy)

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        optimizer.zero_grad(set_to_none=set_to_none)
        with no_sync(model, pair):
            for factor in (1, 2):
                loss_of(model(x * factor), y).backward()
        loss_of(model(x * 3), y).backward()
        optimizer.step()

    pair.train(step)


def test_no_sync_around_run(strategy: ms.Strategy) -> None:
    """Micro-batches of one run each; the last one reduces."""
    pair = Pair(strategy)

    def accumulate(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        loss_of(model(x), y).backward()

    for _ in range(2):
        pair.optimizer.zero_grad()
        pair.optimizer_alone.zero_grad()
        with strategy.no_sync():
            pair.step(accumulate)
            pair.step(accumulate)
        pair.step(accumulate)
        pair.check()
        pair.optimizer.step()
        pair.optimizer_alone.step()
        pair.check()


@pytest.mark.mpi(min_size=2)
def test_no_sync_communicates_nothing(strategy: ms.Strategy) -> None:
    model = build(strategy)
    calls = strategy.extended.communicator.contract.calls  # type: ignore[attr-defined]

    def step() -> Any:
        x, y = (own(t) for t in next(batches()))
        with strategy.no_sync():
            loss_of(model(x), y).backward()
        return model[0].weight.grad

    strategy.run(step)
    assert strategy.extended.communicator.contract.calls == calls  # type: ignore[attr-defined]


def test_no_sync_after_a_reduced_backward(strategy: ms.Strategy) -> None:
    """What is reduced is not reduced again with what was added locally."""
    pair = Pair(strategy)

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        with no_sync(model, pair):
            loss_of(model(x * 2), y).backward()
            loss_of(model(x * 3), y).backward()
        loss_of(model(x * 4), y).backward()
        optimizer.step()

    pair.train(step)


def test_no_sync_uses_other_parameters_than_the_last_backward(strategy: ms.Strategy) -> None:
    pair = Pair(strategy)

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        optimizer.zero_grad()
        with no_sync(model, pair):
            loss_of(model(x), y).backward()
        model[2].bias.square().sum().div(
            pair.strategy.num_replicas_in_sync if model is pair.model else 1
        ).backward()
        optimizer.step()

    pair.train(step)


def test_zero_grad_between_mixed_backwards(strategy: ms.Strategy) -> None:
    """The mix is thrown away by either form of zero_grad, and nothing of it comes back."""
    pair = Pair(strategy)

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        for set_to_none in (False, True, False):
            loss_of(model(x), y).backward()
            with no_sync(model, pair):
                loss_of(model(x * 2), y).backward()
            optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(model(x * 4), y).backward()
        optimizer.step()

    pair.train(step)


def test_a_changed_mix_of_reduced_and_local_gradients_is_refused(strategy: ms.Strategy) -> None:
    pair = Pair(strategy)

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        loss_of(model(x), y).backward()
        with no_sync(model, pair):
            loss_of(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        loss_of(model(x), y).backward()

    if strategy.num_replicas_in_sync > 1:
        with pytest.raises(RuntimeError, match=r"grad of Sequential\.0\.weight mixes"):
            pair.step(step)


def test_no_sync_with_a_collective_inside(strategy: ms.Strategy) -> None:
    """Replicas of one rank take turns inside their no_sync() blocks, each with its own."""
    pair = Pair(strategy)

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        optimizer.zero_grad()
        with no_sync(model, pair):
            count = torch.tensor(len(x))
            if model is pair.model:
                context = ms.get_replica_context()
                assert context is not None
                count = context.all_reduce("sum", count)
            assert count == BATCH
            loss_of(model(x), y).backward()
        loss_of(model(x * 2), y).backward()
        optimizer.step()

    pair.train(step)


def test_several_models_and_optimizers(strategy: ms.Strategy) -> None:
    """A GAN: the discriminator's gradients of the generator's backward are not used."""
    pair = Pair(strategy)
    with strategy.scope():
        discriminator = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU()).double()
    torch.manual_seed(1)
    alone = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU()).double()
    discriminator.load_state_dict(alone.state_dict())
    players = {
        pair.model: (discriminator, torch.optim.Adam(discriminator.parameters(), lr=0.02)),
        pair.alone: (alone, torch.optim.Adam(alone.parameters(), lr=0.02)),
    }

    def step(generator: Any, optimizer: Any, x: Any, real: Any) -> None:
        judge, judge_optimizer = players[generator]
        fake = generator(x)
        judge_optimizer.zero_grad()
        (judge(real).sum() / BATCH).backward()
        (-judge(fake.detach()).square().sum() / BATCH).backward()
        judge_optimizer.step()
        optimizer.zero_grad()
        (judge(fake).square().sum() / BATCH).backward(retain_graph=True)
        (fake.square().sum() / BATCH).backward()
        optimizer.step()

    for _ in range(3):
        pair.train(step, steps=1)
        assert_same_parameters(discriminator, alone)


def test_two_optimizers_of_one_model(strategy: ms.Strategy) -> None:
    pair = Pair(strategy, optimizer=lambda p: torch.optim.SGD(list(p)[:2], lr=0.1))
    others = {
        model: torch.optim.Adam(model[2].parameters(), lr=0.05)
        for model in (pair.model, pair.alone)
    }

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        model.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
        loss_of(model(x), y).backward()
        others[model].step()

    pair.train(step)


def test_closures(one_per_rank: ms.Strategy) -> None:
    """An optimizer that computes gradients itself, more than once per step."""
    pair = Pair(one_per_rank, optimizer=lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3))

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        def closure() -> Any:
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            if model is pair.model:
                context = ms.get_replica_context()
                assert context is not None
                return context.all_reduce("sum", loss.detach())
            return loss

        optimizer.step(closure)

    pair.train(step)


def test_training_goes_on_with_a_new_model(strategy: ms.Strategy) -> None:
    for _ in range(2):
        Pair(strategy, small_net).train(plain_step, steps=2)
