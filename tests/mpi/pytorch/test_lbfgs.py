"""An optimizer that decides by the loss which its closure returns: all ranks decide by that of the whole batch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import mpistrat as ms
from mpistrat.errors import CollectiveMismatchError

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
STEPS, EXAMPLES = 2, 7

LossOf = Callable[..., torch.Tensor]


def net() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)
    ).double()


def lbfgs(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")


def batch(examples: int = EXAMPLES) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(examples, 4, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    return x, x.sin().sum(1, keepdim=True) + x[:, :1] ** 2


def step(
    model: torch.nn.Module,
    optimizer: Any,
    x: torch.Tensor,
    y: torch.Tensor,
    loss_of: LossOf = mse_loss,
    returned: Callable[[torch.Tensor], Any] = lambda loss: loss,
) -> Any:
    def closure() -> Any:
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        return returned(loss)

    return optimizer.step(closure)


def trained_alone(examples: int = EXAMPLES) -> tuple[torch.nn.Module, list[float]]:
    """What one process trains, and the losses that its steps return."""
    model = net()
    optimizer = lbfgs(model)
    return model, [step(model, optimizer, *batch(examples)).item() for _ in range(STEPS)]


def assert_trained(model: torch.nn.Module, losses: list[Any], examples: int = EXAMPLES) -> None:
    expected, of_one = trained_alone(examples)
    torch.testing.assert_close(
        [torch.as_tensor(loss, dtype=torch.double).item() for loss in losses],
        of_one,
        rtol=1e-9,
        atol=1e-12,
    )
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.filterwarnings("ignore:the ranks of a node are to share parameters:RuntimeWarning")
@pytest.mark.parametrize(("examples", "shared"), [(EXAMPLES, False), (2, True)])
def test_a_loader_s_parts_count_by_their_examples(examples: int, shared: bool) -> None:
    """Of 2 examples on 3 ranks, one has none: its own mean is NaN."""
    strategy = ms.MultiWorkerMirroredStrategy(shared_parameters=shared)
    with strategy.replica():
        model, loader = strategy.prepare(
            net(), DataLoader(TensorDataset(*batch(examples)), examples)
        )
        optimizer = lbfgs(model)
        losses = [step(model, optimizer, x, y) for _ in range(STEPS) for x, y in loader]
    assert_trained(model, losses, examples)


def of_all(strategy: ms.Strategy) -> Callable[[torch.Tensor], Any]:
    return lambda loss: strategy.reduce("mean", loss.detach(), axis=None)


@pytest.mark.parametrize(
    "returned",
    [
        lambda strategy: lambda loss: loss.detach().reshape(1),
        lambda strategy: lambda loss: loss.detach().numpy()[()],
        of_all,
    ],
    ids=["vector", "numpy", "reduced by the program"],
)
def test_closures_may_return_what_is_a_number(returned: Any) -> None:
    strategy = ms.MultiWorkerMirroredStrategy()
    x, y = batch(6 * SIZE)
    with strategy.replica():
        model = strategy.prepare(net())
        optimizer = lbfgs(model)
        own = strategy.shard((x, y))
        how = returned(strategy)
        losses = [step(model, optimizer, *own, returned=how) for _ in range(STEPS)]
    example = how(torch.tensor(1.0, dtype=torch.double)) if returned is not of_all else losses[0]
    for loss in losses:
        assert isinstance(loss, torch.Tensor) == isinstance(example, torch.Tensor)
        assert getattr(loss, "shape", ()) == getattr(example, "shape", ())
    assert_trained(model, losses, 6 * SIZE)


def sum_of_part(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    losses = (output - target).square().flatten()
    return ms.compute_average_loss(losses, global_batch_size=EXAMPLES)


@pytest.mark.parametrize("gradients", ["sum", "mean"])
def test_inside_run(gradients: str) -> None:
    strategy = ms.MultiWorkerMirroredStrategy(gradients=gradients)  # type: ignore[arg-type]
    examples, loss_of = (EXAMPLES, sum_of_part) if gradients == "sum" else (6 * SIZE, mse_loss)
    with strategy.scope():
        model = net()
    optimizer = lbfgs(model)

    def own_step() -> Any:
        return step(model, optimizer, *strategy.shard(batch(examples)), loss_of=loss_of)

    assert_trained(model, [strategy.run(own_step) for _ in range(STEPS)], examples)


def test_a_closure_that_computes_no_gradient_counts_as_the_one_before() -> None:
    """As closures do that line searches call under `no_grad()`."""

    class LooksAgain(torch.optim.LBFGS):
        def step(self, closure: Any) -> Any:  # type: ignore[override]
            with torch.enable_grad():
                closure()
            with torch.no_grad():
                return closure()

    strategy = ms.MultiWorkerMirroredStrategy()
    with strategy.replica():
        model = strategy.prepare(net())
        optimizer = LooksAgain(model.parameters())
        x, y = strategy.shard(batch(6 * SIZE))

        def closure() -> torch.Tensor:
            loss = mse_loss(model(x), y)
            if torch.is_grad_enabled():
                loss.backward()
            return loss

        loss = optimizer.step(closure=closure)
    torch.testing.assert_close(loss, mse_loss(net()(batch(6 * SIZE)[0]), batch(6 * SIZE)[1]))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("returned", "kind"),
    [
        (lambda loss: None if RANK == 1 else loss, "rank 1: None"),
        (lambda loss: loss.item() if RANK == 1 else loss, "rank 1: a number"),
        (lambda loss: loss.reshape(1) if RANK == 1 else loss, r"rank 1: a tensor of shape \[1\]"),
    ],
)
def test_losses_that_cannot_be_combined_are_an_error_on_all_ranks(returned: Any, kind: str) -> None:
    strategy = ms.MultiWorkerMirroredStrategy()
    with strategy.replica():
        model = strategy.prepare(net())
        with pytest.raises(CollectiveMismatchError, match=rf"rank {RANK}: LBFGS.*rank 0: .*{kind}"):
            step(model, lbfgs(model), *strategy.shard(batch()), returned=returned)


@pytest.mark.mpi(min_size=2)
def test_without_backward_nothing_says_how_losses_count() -> None:
    strategy = ms.MultiWorkerMirroredStrategy()
    with strategy.replica():
        model = strategy.prepare(net())
        optimizer = lbfgs(model)
        with pytest.raises(CollectiveMismatchError, match=r"Have the closure call backward\(\)"):
            optimizer.step(lambda: torch.tensor(float(RANK)))
        model(batch()[0]).sum().backward()
        assert optimizer.step(lambda: torch.tensor(2.0)) == 2
