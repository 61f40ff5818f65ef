"""`prepare` and `shard`: what a program has on one process becomes its part of what all ranks have."""

import copy
import logging
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mpistrat as ms
from support.rank_errors import assert_all_raise, assert_usable, errors_of_ranks

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
EXAMPLES, BATCH = 3 * 8 + 5, 8  # the last batch is short, and with 4 ranks a part of it is shorter


@pytest.fixture(params=["top level", "replica"])
def strategy(request: pytest.FixtureRequest) -> Iterator[ms.Strategy]:
    made = ms.MultiWorkerMirroredStrategy()
    block: AbstractContextManager[Any] = (
        made.replica() if request.param == "replica" else nullcontext()
    )
    with block:
        yield made


@pytest.fixture
def notices() -> Iterator[list[str]]:
    handler, said = logging.Handler(), list[str]()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mpistrat").addHandler(handler)
    yield said
    logging.getLogger("mpistrat").removeHandler(handler)


def examples() -> TensorDataset:
    x = torch.arange(EXAMPLES * 2.0, dtype=torch.float64).reshape(EXAMPLES, 2).sin()
    return TensorDataset(x, x.sum(1))


def net(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
    ).double()


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def losses(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x).squeeze(1) - y).square()


def batches() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    return DataLoader(examples(), BATCH, shuffle=True, generator=generator)


@pytest.fixture
def one_process() -> tuple[list[Any], list[float], torch.nn.Module]:
    """What a loop without a strategy reads, its losses, and the model that it trains."""
    model, read, means = net(0), [], []
    optimizer = adam(model)
    for x, y in batches():
        optimizer.zero_grad()
        loss = losses(model, x, y).mean()
        loss.backward()
        optimizer.step()
        read.append((x, y))
        means.append(loss.item())
    return read, means, model


def test_a_program_trains_as_one_process(one_process: Any, strategy: ms.Strategy) -> None:
    """With no size of a batch counted by hand, though the last one is short."""
    read, means, alone = one_process
    model = net(RANK)
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    mirrored, same, distributed, kept = strategy.prepare(model, optimizer, batches(), scheduler)
    assert mirrored is model
    assert same is optimizer
    assert kept is scheduler
    parameters = list(model.parameters())
    assert strategy.prepare(model, optimizer) == (model, optimizer)
    assert strategy.prepare(distributed) is distributed
    assert strategy.prepare() == ()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = ms.compute_average_loss(losses(model, x, y))
        loss.backward()
        optimizer.step()
        assert strategy.step_examples is not None
        assert strategy.step_examples[0] == len(x)
        return loss.detach()

    assert strategy.step_examples is None
    for (x, y), whole, mean in zip(distributed, read, means, strict=True):
        part = strategy.shard(whole)
        assert torch.equal(x, part[0])
        assert part[0].untyped_storage().data_ptr() == whole[0].untyped_storage().data_ptr()
        total = strategy.reduce("sum", strategy.run(step, (x, y)), axis=None)
        assert total.item() == pytest.approx(mean, rel=1e-12)
    assert strategy.step_examples is None
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    torch.testing.assert_close(model.state_dict(), alone.state_dict(), rtol=1e-10, atol=1e-12)


def test_a_distributed_loader_answers_for_its_loader(strategy: ms.Strategy) -> None:
    loader = DataLoader(examples(), BATCH, drop_last=True)
    distributed = strategy.prepare(loader)
    assert len(distributed) == len(loader) == EXAMPLES // BATCH
    assert len(distributed.dataset) == EXAMPLES
    for name in (
        "dataset",
        "batch_size",
        "sampler",
        "batch_sampler",
        "drop_last",
        "num_workers",
        "collate_fn",
    ):
        assert getattr(distributed, name) is getattr(loader, name)
    with pytest.raises(AttributeError, match="no 'epochs', and neither has the DataLoader"):
        distributed.epochs  # noqa: B018
    assert not hasattr(strategy.prepare([np.zeros(4)]), "sort")
    assert copy.copy(distributed).batch_size == BATCH


def test_what_cannot_be_prepared(strategy: ms.Strategy) -> None:
    model, others = net(0), net(0)
    sampler: DistributedSampler[Any] = DistributedSampler(examples(), SIZE, RANK)
    wrong: list[tuple[tuple[Any, ...], str, str]] = [
        ((model, adam(others)), "ValueError", "4 parameters, 0 of them in modules .*(Sequential).*4 in none that is"),
        ((adam(others),), "ValueError", "prepared with it .none."),
        ((torch.zeros(3),), "TypeError", "strategy.shard"),
        (([model, others],), "TypeError", r"prepare\(\*modules\)"),
        ((model, [adam(model)]), "TypeError", "modules and optimizers as arguments of their own"),
        (({"model": model},), "TypeError", "prepare takes torch modules, optimizers"),
        ((examples(),), "TypeError", "DataLoaders or other iterables of batches; got <torch"),
        ((DataLoader(examples(), sampler=sampler),), "ValueError", r"prepare\(loader, local_batches=True\)"),
    ]  # fmt: skip
    for objects, kind, message in wrong:
        for name, text, _ in errors_of_ranks(lambda: strategy.prepare(*objects)):  # noqa: B023
            assert name in (kind, "CollectiveMismatchError")
            assert re.search(message, text), text
    assert_all_raise(
        "TypeError",
        SIZE - 1,
        lambda: strategy.prepare(model, 3 if RANK == SIZE - 1 else adam(model)),
    )
    strategy.prepare(model)
    assert strategy.prepare(adam(model)).param_groups
    assert_all_raise(
        "ValueError", 0, lambda: strategy.prepare(others, *([adam(model)] * (RANK == 0)))
    )
    assert_usable(strategy)


def test_local_batches(strategy: ms.Strategy, notices: list[str]) -> None:
    """A DistributedSampler's; its epoch is the iteration's, unless the program sets it."""
    data = examples()
    sampler: DistributedSampler[Any] = DistributedSampler(data, SIZE, RANK, seed=5)
    loader = strategy.prepare(DataLoader(data, 4, sampler=sampler), local_batches=True)
    assert loader.batch_size == 4
    assert loader.sampler is sampler

    def expected(epoch: int) -> list[float]:
        alike: DistributedSampler[Any] = DistributedSampler(data, SIZE, RANK, seed=5)
        alike.set_epoch(epoch)
        return [data[i][0][0].item() for i in alike]

    def epoch() -> list[float]:
        read = [x[0] for batch in loader for x in batch[0].tolist()]
        assert strategy.step_examples is None
        return read

    assert [epoch(), epoch()] == [expected(0), expected(1)]
    loader.sampler.set_epoch(7)
    assert [epoch(), epoch()] == [expected(7)] * 2
    assert len(loader) == -(-len(sampler) // 4)
    assert not notices


def test_local_batches_end_with_the_shortest_rank(
    strategy: ms.Strategy, notices: list[str]
) -> None:
    class Stream:
        def __iter__(self) -> Iterator[np.ndarray]:
            return iter([np.full(2, RANK)] * (2 + RANK))

    known = strategy.prepare([np.full(2, RANK)] * (2 + RANK), local_batches=True)
    streamed = strategy.prepare(Stream(), local_batches=True)
    assert len(known) == 2
    for _ in range(2):
        assert [batch.tolist() for batch in known] == [[RANK] * 2] * 2
        assert [batch.tolist() for batch in streamed] == [[RANK] * 2] * 2
    longer = range(1, SIZE)
    if RANK or SIZE == 1:
        assert not notices
    else:
        assert [text.split("(")[1] for text in notices] == [
            ", ".join(f"rank {rank}: {2 + rank}" for rank in longer) + ")",
            ", ".join(f"rank {rank}" for rank in longer) + ")",
        ]
    assert_usable(strategy)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("known", [True, False], ids=["known lengths", "streams"])
def test_a_rank_without_local_batches_is_an_error_on_all(strategy, known):
    own = [np.zeros(2)] * (0 if RANK == SIZE - 1 else 2)

    class Stream:
        def __iter__(self):
            return iter(own)

    def train():
        for _ in strategy.prepare(own if known else Stream(), local_batches=True):
            raise AssertionError("a rank has no data")

    for kind, text, _ in errors_of_ranks(train):
        assert kind == "ValueError"
        assert f"rank {SIZE - 1} of {SIZE} has no data for a step" in text
        assert f"cut it into {SIZE} shards or more" in text


def test_a_rank_that_has_fewer_local_batches_than_it_says(strategy: ms.Strategy) -> None:
    class Short(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(self[: 1 if RANK == SIZE - 1 else 2])

    loader = strategy.prepare(Short([np.zeros(1)] * 2), local_batches=True)
    if SIZE == 1:
        assert len(list(loader)) == 1
    else:

        def steps() -> None:
            for batch in loader:
                strategy.reduce("sum", batch, axis=None)

        assert_all_raise("ValueError", SIZE - 1, steps)


def test_shards_are_what_the_loader_gives() -> None:
    """Views, along any dimension, of each replica, however many a rank has."""
    strategy = ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"])
    n = strategy.num_replicas_in_sync
    whole: dict[str, Any] = {
        "x": np.arange(5 * 3).reshape(5, 3),
        "y": (torch.arange(10.0).reshape(2, 5),),
    }
    step = next(iter(strategy.experimental_distribute_dataset([whole["x"]])))

    def parts(x: np.ndarray) -> tuple[Any, ...]:
        own = strategy.shard(whole["x"])
        assert np.array_equal(own, x)
        assert own.base is not None
        with pytest.raises(ValueError, match=r"divides their dimension 1; got one of shape .3."):
            strategy.shard((np.zeros((2, 2)), np.zeros(3)), dim=1)
        for leaf in (3, "text", None, np.float64(1)):
            with pytest.raises(ValueError, match="shard takes arrays"):
                strategy.shard(leaf)
        return own, strategy.shard(whole["y"][0], dim=-1)

    rows, columns = strategy.run(parts, (step,))
    counted = strategy.run(lambda: np.array(strategy.step_examples))
    assert strategy.gather(columns, axis=1).shape == (2, 5)
    assert sorted(strategy.gather(rows, axis=0).ravel()) == list(range(15))
    assert strategy.reduce("sum", counted, axis=None).tolist() == [5, 5 * n]
    with pytest.raises(RuntimeError, match="outside run, and this rank has 2 replicas"):
        strategy.shard(whole)
    other = ms.OneDeviceStrategy("cpu:0")
    with other.scope(), pytest.raises(RuntimeError, match="is in force"):
        strategy.shard(whole)
    assert np.array_equal(other.shard(whole["x"]), whole["x"])


@pytest.mark.mpi(min_size=2)
def test_an_optimizer_that_one_rank_has_loaded(strategy: ms.Strategy) -> None:
    """Others would go on without its state, and nobody would notice."""
    model = net(0)
    optimizer = adam(model)
    if RANK == 0:
        for parameter in model.parameters():
            optimizer.state[parameter] = {"step": torch.tensor(3.0)}
    errors = errors_of_ranks(lambda: strategy.prepare(model, optimizer))
    assert {name for name, _, _ in errors} == {"ValueError"}, errors
    assert all("parameters after 3 steps on rank 0" in message for _, message, _ in errors), errors
    strategy.prepare(net(0))
    assert_usable(strategy)
