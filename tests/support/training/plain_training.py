"""Training in one process, on whole batches, with which the training of several ranks is compared."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

FEATURES = 6
OUTPUTS = 3
HIDDEN = 24
EXAMPLES = 12  # of a batch: 1, 2, 3 and 4 ranks have equally many
MOST = 0.5  # of the norm of a gradient: it is clipped


def network() -> torch.nn.Sequential:
    """On all ranks with the same values."""
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, HIDDEN),
        torch.nn.Tanh(),
        torch.nn.Linear(HIDDEN, HIDDEN),
        torch.nn.Tanh(),
        torch.nn.Linear(HIDDEN, OUTPUTS),
    )


def batches(steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The whole ones."""
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(EXAMPLES, FEATURES, generator=generator)
        yield x, 10 * torch.randn(EXAMPLES, OUTPUTS, generator=generator)


def part_of(batch: tuple[torch.Tensor, torch.Tensor], rank: int, size: int) -> Any:
    """The examples of a rank."""
    return tuple(tensor.chunk(size)[rank] for tensor in batch)


def adamw(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.05)


def clipped_step(
    module: Callable[[torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    x: torch.Tensor,
    y: torch.Tensor,
) -> torch.Tensor:
    """Returns: the mean loss of this batch."""
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(module(x), y)
    loss.backward()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    torch.nn.utils.clip_grad_norm_(parameters, MOST)
    optimizer.step()
    return loss.detach()


def trained_alone(
    steps: int, make: Callable[[], torch.nn.Module] = network
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The state that one process has after so many steps, and the losses."""
    module = make()
    optimizer = adamw(module)
    losses = []
    for x, y in batches(steps):
        loss = clipped_step(module, optimizer, x, y)
        losses.append(float(loss))
    return whole_state(module), losses


def whole_state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Collective where there are DTensors."""
    state = module.state_dict()
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in state.items()
    }


def assert_close(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], most: float = 1e-5
) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=most, atol=most, msg=name)
