"""Gradients that are sparse, narrow, complex or laid out otherwise."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import mpistrat as ms
from support.training.whole_batch import (
    BATCH,
    Pair,
    assert_same_gradient,
    batches,
    build,
    equal_on_all_ranks,
    loss_of,
    own,
    plain_step,
)

ROWS = 7


def words() -> torch.Tensor:
    """Row 0 for the first three examples only: some replicas do not use it, none uses the last two."""
    return torch.tensor([0, 0, 0, *(1 + i % (ROWS - 3) for i in range(BATCH - 3))])


class Words(torch.nn.Module):
    def __init__(self, everywhere: bool = True) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(ROWS, 2, sparse=True)
        self.everywhere = everywhere

    def forward(self, x: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
        used = self.everywhere or bool((word == 0).any())
        return x[:, :2] + self.rows(word) if used else x[:, :2] * self.rows.weight.new_ones(1)


def word_step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
    optimizer.zero_grad()
    word = own(words()) if ms.has_strategy() else words()
    loss = loss_of(model(x, word), y)
    if loss.requires_grad:
        loss.backward()
    else:
        torch.zeros((), requires_grad=True).backward()
    optimizer.step()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.SparseAdam])
def test_sparse_gradients(strategy: ms.Strategy, optimizer: Any) -> None:
    pair = Pair(strategy, Words, optimizer=lambda p: optimizer(list(p), lr=0.1))
    for _ in range(3):
        pair.step(word_step)
        torch.testing.assert_close(pair.model.rows.weight, pair.alone.rows.weight)
        gradient = pair.model.rows.weight.grad
        assert gradient.is_sparse
        assert_same_gradient(gradient, pair.alone.rows.weight.grad, "rows")


def test_sparse_gradients_that_some_replicas_lack(strategy: ms.Strategy) -> None:
    model = build(strategy, lambda: Words(everywhere=False))
    before = model.rows.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = next(batches())
    strategy.run(lambda: word_step(model, optimizer, own(x), own(y)))
    # Alone, the examples of exactly the replicas that have a row 0.
    n = strategy.num_replicas_in_sync
    counted = torch.cat(
        [
            part if (words()[part] == 0).any() else part[:0]
            for part in torch.arange(BATCH).tensor_split(n)
        ]
    )
    weight = before.clone().requires_grad_()
    output = x[counted, :2] + weight[words()[counted]]
    loss_of(output, y[counted]).backward()
    assert weight.grad is not None
    torch.testing.assert_close(model.rows.weight.detach(), before - 0.1 * weight.grad)


def test_sparse_gradients_accumulate(strategy: ms.Strategy) -> None:
    pair = Pair(strategy, Words, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        optimizer.zero_grad()
        word = own(words()) if ms.has_strategy() else words()
        loss_of(model(x, word), y).backward()
        loss_of(model(x, word) * 2, y).backward()
        optimizer.step()

    pair.train(step)


def test_dense_on_one_replica_and_sparse_on_another(strategy: ms.Strategy) -> None:
    """As on one process, where the sum of both is dense."""
    pair = Pair(strategy, Words, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        optimizer.zero_grad()
        context = ms.get_replica_context()
        assert context is not None
        word = own(words()) if ms.has_strategy() else words()
        loss = loss_of(model(x, word), y)
        if context.replica_id_in_sync_group == 0:
            loss = loss + model.rows.weight.square().sum()
        loss.backward()
        optimizer.step()

    pair.train(step)


def test_embedding_bags(strategy: ms.Strategy) -> None:
    class Bag(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = torch.nn.EmbeddingBag(ROWS, 2, mode="sum", sparse=True)

        def forward(self, x: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
            return x[:, :2] + self.rows(word[:, None])

    Pair(strategy, Bag, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)).train(word_step)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_parameters(strategy: ms.Strategy, dtype: torch.dtype) -> None:
    with strategy.scope():
        model = torch.nn.Linear(4, 2).to(dtype)
    x, y = next(batches())
    alone = torch.nn.Linear(4, 2).double()
    alone.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy.run(lambda: plain_step(model, optimizer, own(x).to(dtype), own(y).to(dtype)))
    plain_step(alone, torch.optim.SGD(alone.parameters(), lr=0.1), x, y)
    rounding = 30 * torch.finfo(dtype).eps
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert mine.grad is not None
        assert mine.grad.dtype == dtype
        torch.testing.assert_close(mine.grad.double(), other.grad, rtol=rounding, atol=rounding)
        torch.testing.assert_close(
            mine.detach().double(), other.detach(), rtol=rounding, atol=rounding
        )
        assert equal_on_all_ranks(strategy, mine)


def test_mixed_dtypes_in_one_model(strategy: ms.Strategy) -> None:
    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = torch.nn.Linear(4, 3)
            self.narrow = torch.nn.Linear(3, 2)

        def double(self) -> Any:
            self.wide.double()
            return self

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.narrow(self.wide(x).float()).double()

    pair = Pair(strategy, Mixed)
    pair.step(plain_step)
    for mine, other in zip(pair.model.parameters(), pair.alone.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_complex_parameters(strategy: ms.Strategy) -> None:
    class Rotation(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = torch.nn.Parameter(torch.randn(2, dtype=torch.complex128))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            z = torch.complex(x[:, :2], x[:, 2:]) * self.factor
            return z.real + z.imag.square()

        def double(self) -> Any:
            return self

    Pair(strategy, Rotation).train(plain_step)


def convolution(layout: Callable[[torch.nn.Module], torch.nn.Module]) -> torch.nn.Module:
    return layout(
        torch.nn.Sequential(
            torch.nn.Unflatten(1, (1, 2, 2)),
            torch.nn.Conv2d(1, 3, 2, padding=1),
            torch.nn.Tanh(),
            torch.nn.Conv2d(3, 2, 3),
            torch.nn.Flatten(),
        )
    )


@pytest.mark.parametrize("when", ["in scope", "later"])
def test_channels_last(strategy: ms.Strategy, when: str) -> None:
    def channels_last(module: torch.nn.Module) -> torch.nn.Module:
        return module.to(memory_format=torch.channels_last)

    in_scope = when == "in scope"
    pair = Pair(strategy, lambda: convolution(channels_last if in_scope else lambda m: m))
    if not in_scope:
        channels_last(pair.model)
        channels_last(pair.alone)
    pair.train(plain_step)
    weight = pair.model[3].weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    if strategy.num_replicas_in_sync > 1:
        assert weight.grad.stride() == weight.stride()


def test_parameters_that_are_views_with_gaps(strategy: ms.Strategy) -> None:
    class Gaps(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4, 6, dtype=torch.float64)[:, ::3])

        def double(self) -> Any:
            return self

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    Pair(strategy, Gaps).train(plain_step)


def test_scalar_and_empty_parameters(strategy: ms.Strategy) -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.randn(()))
            self.empty = torch.nn.Parameter(torch.randn(0, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, :2] * self.scale + self.empty.sum(0)

    Pair(strategy, Odd).train(plain_step)
