"""What `backward()` leaves in `.grad`: the gradient of the whole batch, whatever is done around it."""

import copy
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import mpistrat as ms
from support.training.whole_batch import (
    BATCH,
    FEATURES,
    Pair,
    assert_same_parameters,
    in_run,
    loss_of,
    momentum_sgd,
    own,
    plain_step,
    replica_id,
)


def test_plain_steps(strategy: ms.Strategy) -> None:
    Pair(strategy).train(plain_step, steps=4)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_optimizers(strategy: ms.Strategy, optimizer: Any) -> None:
    Pair(strategy, optimizer=optimizer).train(plain_step)


def test_clipping_sees_the_gradient_of_the_whole_batch(strategy: ms.Strategy) -> None:
    norms = []

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3))
        optimizer.step()

    Pair(strategy).train(step)
    replicas = strategy.extended.num_local_replicas
    for i in range(0, len(norms), replicas + 1):
        for norm in norms[i : i + replicas + 1]:
            torch.testing.assert_close(norm, norms[i])


def test_grad_scaler(one_per_rank: ms.Strategy) -> None:
    """Scaled, unscaled, clipped; an overflow of one replica makes all skip the step."""
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in range(2)]
    overflow = False

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        scaler = scalers[in_run()]
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        if overflow and replica_id() == 0:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()

    pair = Pair(one_per_rank)
    for overflow in (False, True, False, False, False):
        pair.step(step)
        assert_same_parameters(pair.model, pair.alone, gradients=not overflow)
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert scalers[0].get_scale() == 2.0**10


def test_scheduler_after_run(strategy: ms.Strategy) -> None:
    pair = Pair(strategy)
    schedulers = [
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for optimizer in (pair.optimizer, pair.optimizer_alone)
    ]
    for _ in range(3):
        pair.train(plain_step, steps=1)
        for scheduler in schedulers:
            scheduler.step()
    assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr() == [0.1 * 0.5**3]


def test_scheduler_in_run(one_per_rank: ms.Strategy) -> None:
    pair = Pair(one_per_rank)
    schedulers = {
        optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=5)
        for optimizer in (pair.optimizer, pair.optimizer_alone)
    }

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        plain_step(model, optimizer, x, y)
        schedulers[optimizer].step()

    pair.train(step)


def test_parameter_groups(strategy: ms.Strategy) -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        weights, biases = [], []
        for parameter in parameters:
            (weights if parameter.dim() > 1 else biases).append(parameter)
        return torch.optim.SGD(
            [{"params": weights, "lr": 0.2, "weight_decay": 0.1}, {"params": biases}], lr=0.05
        )

    Pair(strategy, optimizer=optimizer).train(plain_step)


def test_a_group_added_later(strategy: ms.Strategy) -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(list(parameters)[:2], lr=0.1)

    pair = Pair(strategy, optimizer=optimizer)
    pair.train(plain_step, steps=1)
    pair.optimizer.add_param_group({"params": list(pair.model.parameters())[2:]})
    pair.optimizer_alone.add_param_group({"params": list(pair.alone.parameters())[2:]})
    pair.train(plain_step, steps=2)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("where", ["in run", "after run"])
def test_zero_grad_in_both_forms(strategy: ms.Strategy, set_to_none: bool, where: str) -> None:
    def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        if where == "in run":
            optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(model(x), y).backward()
        optimizer.step()

    pair = Pair(strategy)
    for _ in range(3):
        pair.step(step)
        pair.check()
        if where == "after run":
            pair.optimizer.zero_grad(set_to_none=set_to_none)
            pair.optimizer_alone.zero_grad(set_to_none=set_to_none)


def test_unused_parameters_that_differ_between_replicas(strategy: ms.Strategy) -> None:
    """A gradient is None only if no replica used the parameter."""

    class Branches(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = torch.nn.ModuleList(torch.nn.Linear(FEATURES, 2) for _ in range(3))

        def forward(self, x: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
            """Example i goes through branch[i]; a branch without examples is not called."""
            outputs = x.new_zeros(len(x), 2)
            for b in branch.unique().tolist():
                rows = (branch == b).nonzero()[:, 0]
                outputs = outputs.index_put((rows,), self.branches[b](x[rows]))
            return outputs

    pair = Pair(strategy, Branches, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    # The first step uses branch 0 in the first examples only, branch 1 in the others, branch 2 nowhere.
    for cut, last in ((2, 1), (BATCH, 1), (0, 2), (3, 2)):
        branch = torch.tensor([0] * cut + [last] * (BATCH - cut))

        def step(model: Any, optimizer: Any, x: Any, y: Any, branch: Any = branch) -> None:
            optimizer.zero_grad()
            loss_of(model(x, own(branch) if in_run() else branch), y).backward()
            optimizer.step()

        pair.train(step, steps=1)
        assert (pair.model.branches[2].weight.grad is None) == (last == 1)


def test_a_replica_without_examples(strategy: ms.Strategy) -> None:
    pair = Pair(strategy)
    x, y = (t[:1] for t in next(pair.batches))
    strategy.run(lambda: loss_of(pair.model(own(x)), own(y)).backward())
    loss_of(pair.alone(x), y).backward()
    pair.check()


def test_shared_parameters(strategy: ms.Strategy) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(FEATURES, 2, bias=False)
            self.second = torch.nn.Linear(2, FEATURES)
            self.third = torch.nn.Linear(FEATURES, 2)
            self.third.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.third(self.second(self.first(x).tanh()))

    Pair(strategy, Tied).train(plain_step)


def test_late_unfreezing(strategy: ms.Strategy) -> None:
    pair = Pair(strategy)
    for model in (pair.model, pair.alone):
        model[0].requires_grad_(False)
    pair.train(plain_step, steps=2)
    assert pair.model[0].weight.grad is None
    for model in (pair.model, pair.alone):
        model[0].requires_grad_(True)
    pair.train(plain_step, steps=2)
    assert pair.model[0].weight.grad is not None


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(strategy: ms.Strategy, use_reentrant: bool) -> None:
    class Checkpointed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(
                torch.nn.Sequential(torch.nn.Linear(FEATURES, FEATURES), torch.nn.Tanh())
                for _ in range(3)
            )
            self.last = torch.nn.Linear(FEATURES, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = (
                x.requires_grad_()
            )  # reentrant checkpointing needs an input that requires a gradient
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=use_reentrant)
            return self.last(x)

    Pair(strategy, Checkpointed).train(plain_step)


def test_gradient_penalty(strategy: ms.Strategy) -> None:
    def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        optimizer.zero_grad()
        x = x.clone().requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        (loss_of(output, y) + slope.square().sum() / BATCH).backward()
        optimizer.step()

    Pair(strategy).train(step)


def test_backward_with_inputs(strategy: ms.Strategy) -> None:
    def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        optimizer.zero_grad()
        loss_of(model(x), y).backward(inputs=[model[0].weight, model[2].bias])
        optimizer.step()

    pair = Pair(strategy)
    pair.train(step)
    assert pair.model[0].bias.grad is None


def test_backward_of_several_tensors_with_given_gradients(strategy: ms.Strategy) -> None:
    def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        optimizer.zero_grad()
        output = model(x)
        torch.autograd.backward([output, output * output], [y / BATCH, y.square() / BATCH])
        optimizer.step()

    Pair(strategy).train(step)


def test_compute_average_loss_with_weights_and_regularization(one_per_rank: ms.Strategy) -> None:
    pair = Pair(one_per_rank)
    weights = torch.linspace(0, 1, BATCH, dtype=torch.float64)

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        optimizer.zero_grad()
        losses = (model(x) - y).square()
        size = sum(p.square().sum() for p in model.parameters())
        if in_run():
            loss = ms.compute_average_loss(losses, own(weights), global_batch_size=BATCH)
            loss = loss + ms.scale_regularization_loss(size)
        else:
            loss = (losses * weights[:, None]).sum() / BATCH + size
        loss.backward()
        optimizer.step()

    pair.train(step)


def test_gradients_of_an_earlier_step_stay_as_they_were(strategy: ms.Strategy) -> None:
    """Also views and NumPy arrays of them, though the memory is used again once nobody looks."""
    pair = Pair(strategy)
    kept: list[tuple[Any, Any]] = []
    for i in range(6):
        pair.step(plain_step)
        gradient = pair.model[0].weight.grad
        assert gradient is not None
        now = (gradient, gradient[0], gradient.t()[1:], gradient.detach().numpy())[i % 4]
        kept.append((now, copy.deepcopy(now)))
        del gradient, now
        for now, before in kept:
            assert (now == before).all()


def test_memory_of_gradients_is_used_again(one_per_rank: ms.Strategy) -> None:
    large = torch.nn.Parameter(torch.ones(100_000))
    one_per_rank.mirror(large)  # type: ignore[arg-type]
    addresses = set()

    def step() -> None:
        large.grad = None
        large.sum().backward()

    for _ in range(6):
        one_per_rank.run(step)
        assert large.grad is not None
        addresses.add(large.grad.data_ptr())
    if one_per_rank.num_replicas_in_sync > 1:
        assert len(addresses) <= 2


def test_gradients_are_equal_bit_for_bit_on_all_replicas(strategy: ms.Strategy) -> None:
    pair = Pair(strategy, optimizer=momentum_sgd)
    x, y = next(pair.batches)

    def step() -> Any:
        plain_step(pair.model, pair.optimizer, own(x), own(y))
        return pair.model[0].weight.grad.clone()

    results = strategy.experimental_local_results(strategy.run(step))
    everyone = strategy.extended.communicator.all_gather_object([*results, pair.model[0].weight])
    for gradient in (g for own_results in everyone for g in own_results[:-1]):
        assert torch.equal(gradient, everyone[0][0])
    for *_, weight in everyone:
        assert torch.equal(weight, everyone[0][-1])


def test_a_data_loader(strategy: ms.Strategy) -> None:
    """Of global batches, the last of which is smaller, over two epochs."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(30, FEATURES, dtype=torch.float64, generator=generator)
    data = torch.utils.data.TensorDataset(x, x[:, :2] * 2)
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH)
    pair = Pair(strategy)

    def step(batch: Any) -> Any:
        plain_step(pair.model, pair.optimizer, *batch)
        return len(batch[0])

    distributed = strategy.experimental_distribute_dataset(loader)
    for _ in range(2):
        for per_replica, whole in zip(distributed, loader, strict=True):
            counts = strategy.run(step, args=(per_replica,))
            assert strategy.reduce("sum", counts, axis=None) == len(whole[0])
            plain_step(pair.alone, pair.optimizer_alone, *whole)
            pair.check()


def test_collectives_are_differentiable(strategy: ms.Strategy) -> None:
    """A loss of the outputs of all replicas, through all_gather and all_reduce."""
    pair = Pair(strategy)
    replicas = strategy.num_replicas_in_sync

    def of_all(output: torch.Tensor) -> torch.Tensor:
        similar = output @ output.t()
        return (similar - similar.mean()).square().sum() + output.mean(0).norm()

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        optimizer.zero_grad()
        output = model(x)
        if not in_run():
            (of_all(output) + output.sum().square()).backward()
        else:
            context = ms.get_replica_context()
            assert context is not None
            total = context.all_reduce("sum", {"outputs": output.sum()})["outputs"]
            everyone = context.all_gather(output, axis=0)
            # Every replica computes the whole loss, so a sum of gradients counts it once per replica.
            ((of_all(everyone) + total.square()) / replicas).backward()
        optimizer.step()

    pair.train(step)
