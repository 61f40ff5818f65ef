"""`with strategy.replica():` — the program's own loop is the replica's work, and trains as one process would."""

import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import mpistrat as ms
from mpistrat.compat import v1
from support.rank_errors import assert_usable, errors_of_ranks

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
several = pytest.mark.skipif(SIZE == 1, reason="needs 2 MPI ranks or more")
FEATURES, CLASSES, EPOCHS = 5, 3, 2
# A last batch of 2 of 38 examples, and parts of 12 that differ in size on 5 ranks: 3 ranks have no example of the last.
EXAMPLES, BATCH = 38, 12


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def strategy() -> ms.Strategy:
    return ms.MultiWorkerMirroredStrategy()


def net(*more: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 8), torch.nn.Tanh(), *more, torch.nn.Linear(8, CLASSES)
    )


def examples(count: int = EXAMPLES, seed: int = 5) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=generator)
    return TensorDataset(x, torch.randint(0, CLASSES, (count,), generator=generator))


def loader(**how: Any) -> DataLoader:
    how = {"generator": torch.Generator().manual_seed(7), "shuffle": True, **how}
    return DataLoader(examples(), BATCH, **how)


def train(
    model: torch.nn.Module, batches: Any, loss_of: Callable[..., Any] = cross_entropy
) -> None:
    """A loop such as programs have."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for _ in range(EPOCHS):
        for x, y in batches:
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()


def alone(loss_of: Callable[..., Any] = cross_entropy) -> torch.nn.Module:
    """What one process trains."""
    model = net()
    train(model, loader(), loss_of)
    return model


def assert_equal(model: torch.nn.Module, expected: torch.nn.Module) -> None:
    pairs = zip(model.state_dict().values(), expected.state_dict().values(), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def mirrored(strategy: ms.Strategy, *more: torch.nn.Module) -> torch.nn.Module:
    return strategy.mirror(net(*more))


# Training


def test_a_plain_loop_trains_as_one_process(strategy: ms.Strategy) -> None:
    """A mean over each part of a batch is the global batch's mean, whatever the sizes of the parts."""
    distributed = strategy.experimental_distribute_dataset(loader())
    with strategy.replica() as context:
        assert ms.get_replica_context() is context
        assert not ms.in_cross_replica_context()
        model = mirrored(strategy)
        train(model, distributed)
    assert ms.get_strategy() is not strategy
    assert_equal(model, alone())
    steps = EPOCHS * -(-EXAMPLES // BATCH)
    assert strategy.runs == steps
    if SIZE > 1:
        assert strategy.extended.modules.made.reducer.steps == steps
        explained = strategy.extended.explain()
        assert "leaves the mean of gradients, decided by backward() over" in explained
        assert "inside strategy.replica(), where it is the default" in explained
        assert f"{Path(__file__).name}:" in explained  # the line of the first backward()


@pytest.mark.parametrize("way", ["shared_parameters", "deterministic"])
def test_other_ways_to_keep_parameters(way: str) -> None:
    strategy = ms.MultiWorkerMirroredStrategy(**{way: True})
    with strategy.replica():
        model = mirrored(strategy)
        train(model, strategy.experimental_distribute_dataset(loader()))
    assert_equal(model, alone())


def test_a_loss_that_chooses_the_sum(strategy: ms.Strategy) -> None:
    """The first loss decides, as it does in `run`; the loader says how large the global batch is."""

    def loss_of(output: torch.Tensor, y: torch.Tensor) -> Any:
        return ms.compute_average_loss(cross_entropy(output, y, reduction="none"))

    with strategy.replica():
        model = mirrored(strategy)
        train(model, strategy.experimental_distribute_dataset(loader()), loss_of)
    assert_equal(model, alone())


def test_a_loss_that_is_a_sum() -> None:
    def loss_of(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(output, y, reduction="sum") / BATCH

    strategy = ms.MultiWorkerMirroredStrategy(gradients="sum")
    with strategy.replica():
        model = mirrored(strategy)
        train(model, strategy.experimental_distribute_dataset(loader()), loss_of)
    assert_equal(model, alone(loss_of))


def test_accumulation(strategy: ms.Strategy) -> None:
    """Two batches a step: the first one stays on its replica. A step ends with the optimizer's."""

    def accumulate(model: torch.nn.Module, batches: Any, no_sync: Callable[[], Any]) -> None:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for i, (x, y) in enumerate(batches):
            if i % 2 == 0:
                with no_sync():
                    (cross_entropy(model(x), y) / 2).backward()
            else:
                (cross_entropy(model(x), y) / 2).backward()
                optimizer.step()
                optimizer.zero_grad()

    expected = net()
    accumulate(expected, loader(), torch.enable_grad)
    with strategy.replica():
        model = mirrored(strategy)
        distributed = strategy.experimental_distribute_dataset(loader())
        accumulate(model, distributed, strategy.no_sync)
    assert_equal(model, expected)
    if SIZE > 1:
        assert strategy.extended.modules.made.reducer.steps == 2


def test_random_numbers_are_the_programs(strategy: ms.Strategy) -> None:
    torch.manual_seed(11 + RANK)
    expected = torch.rand(3)
    torch.manual_seed(11 + RANK)
    with strategy.replica():
        assert torch.equal(torch.rand(3), expected)


def test_a_part_that_counts_too_much(strategy: ms.Strategy, notices: list[str]) -> None:
    """Nothing says in `backward()` how large the parts of an array are: the first rank says so, once for each size."""
    with strategy.replica():
        for size in (6 * SIZE, 7 * SIZE + 1, 7 * SIZE + 1):
            strategy.shard(np.ones((2, size)), dim=1)
        distributed = strategy.prepare(DataLoader(examples(5 * SIZE + 1), 5 * SIZE + 1))
        for _ in distributed:  # noise for a batch of the loader's
            strategy.shard(np.ones(strategy.step_examples[1]))
    assert len(notices) == (RANK == 0 and SIZE > 1)
    assert all(f"dimension 1, of size {7 * SIZE + 1}, does not divide" in text for text in notices)


Step = Callable[[Any, Any], None]


def validate_in_mid_step(batches: Any, others: Any, step: Step) -> None:
    for x, y in batches:
        for _ in others:
            pass
        step(x, y)


def repeat_the_first(batches: Any, others: Any, step: Step) -> None:
    x, y = next(iter(batches))
    step(x, y)
    step(x, y)


def read_by_hand(batches: Any, others: Any, step: Step) -> None:
    iterator = iter(batches)
    while (batch := next(iterator, None)) is not None:
        step(*batch)


def read_ahead(batches: Any, others: Any, step: Step) -> None:
    iterator = iter(batches)
    batch = next(iterator)
    while batch is not None:
        following = next(iterator, None)
        step(*batch)
        batch = following


@pytest.mark.parametrize("loop", [validate_in_mid_step, repeat_the_first, read_by_hand, read_ahead])
def test_a_loss_counts_by_the_step_that_it_is_of(
    strategy: ms.Strategy, loop: Callable[..., None], notices: list[str]
) -> None:
    """Where a program reads ahead that is not known: an error where that makes a difference."""

    def trained(model: torch.nn.Module, batches: Any, others: Any) -> torch.nn.Module:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()

        loop(batches, others, step)
        return model

    others = DataLoader(examples(7), 7)
    is_known = loop is not read_ahead or (BATCH % SIZE == EXAMPLES % BATCH % SIZE == 0)
    with strategy.replica():
        objects = strategy.prepare(net(), loader(), others)
        if is_known:
            ours = trained(*objects)
        else:
            refused(lambda: trained(*objects), "loaders gave steps of [2, 12] examples")
    if is_known:
        assert_equal(ours, trained(net(), loader(), others))
    said_once = [text for text in notices if "several steps before the first backward()" in text]
    assert len(said_once) == (RANK == 0 and SIZE > 1 and loop is read_ahead)


# What is legal


def test_calls_of_both_contexts(strategy: ms.Strategy, directory: Path) -> None:
    with strategy.replica() as context:
        assert strategy.reduce("sum", float(RANK), axis=None) == SIZE * (SIZE - 1) / 2
        assert strategy.gather(np.array([RANK]), axis=0).tolist() == [*range(SIZE)]
        assert context.all_reduce("sum", np.ones(2)).tolist() == [SIZE] * 2
        assert context.merge_call(lambda s: ms.in_cross_replica_context())
        with strategy.scope():
            assert ms.in_cross_replica_context()
            torch.manual_seed(RANK)
            model = torch.nn.Linear(2, 2)  # of rank 0's values when the scope is left
            weight = ms.Variable(np.ones(()), aggregation=ms.VariableAggregation.SUM)
            with pytest.raises(RuntimeError, match="cross-replica"):
                context.all_reduce("sum", 1.0)
        torch.manual_seed(0)
        assert torch.equal(model.weight, torch.nn.Linear(2, 2).weight)
        weight.assign_add(np.ones(()))
        assert float(weight) == 1.0 + SIZE
        with strategy.replica() as nested:  # changes nothing
            assert nested is context
        assert strategy.run(lambda x, y: (x, y, ms.get_replica_context()), (1,), {"y": 2}) == (
            1,
            2,
            context,
        )
        assert next(iter(strategy.run(strategy.experimental_distribute_dataset, (loader(),))))
        manager = ms.checkpoint.CheckpointManager(
            ms.checkpoint.Checkpoint(model=model, weight=weight), directory
        )
        manager.save(1)
        weight.assign_add(np.ones(()))
        assert manager.restore_or_initialize() is not None
        assert float(weight) == 1.0 + SIZE
        sentinel = ms.fault_tolerance.DivergenceSentinel(strategy)
        sentinel.check()
    assert_usable(strategy)


@several
def test_a_model_that_was_forgotten(strategy: ms.Strategy) -> None:
    with strategy.replica():
        refused(lambda: train(net(), loader()), "where no module is mirrored")


def refused(call: Callable[[], Any], text: str) -> None:
    errors = errors_of_ranks(call)
    assert {name for name, _, _ in errors} == {"RuntimeError"}, errors
    assert all(text in message for _, message, _ in errors), errors


def test_where_there_is_no_block(strategy: ms.Strategy) -> None:
    of_two = ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"])
    refused(
        of_two.replica, "rank 0 has 2 replicas, which take turns in run: start one rank per replica"
    )
    refused(lambda: strategy.run(strategy.replica), "replica() was called inside run")
    with of_two.scope():
        refused(strategy.replica, "strategies must not be mixed")
    with strategy.replica():
        refused(of_two.scope().__enter__, "strategies must not be mixed")
        refused(lambda: of_two.reduce("sum", 1.0, None), "strategies must not be mixed")
        refused(
            lambda: ms.experimental_set_strategy(strategy),
            "outside every scope(), replica() and run",
        )


def test_servers_have_no_block() -> None:
    """A worker that is its own server; on each rank one."""
    strategy = v1.ParameterServerStrategy(comm=MPI.COMM_SELF)
    refused(strategy.replica, "servers have the variables")


def test_scope_around_it(strategy: ms.Strategy) -> None:
    """As `run` may be called in the scope: modules are mirrored when the replica begins."""
    with strategy.scope():
        model = net()
        with strategy.replica():
            train(model, strategy.experimental_distribute_dataset(loader()))
    assert_equal(model, alone())


def test_an_exception_leaves_it(strategy: ms.Strategy) -> None:
    with pytest.raises(KeyError), strategy.replica():
        raise KeyError("of the program's")
    assert not ms.has_strategy()
    assert_usable(strategy)


def test_threads_of_the_program(strategy: ms.Strategy) -> None:
    """Another thread is in no replica, unless it enters it."""
    found: list[Any] = []

    def backward(model: torch.nn.Module) -> None:
        try:
            model(torch.ones(1, FEATURES)).sum().backward()
        except RuntimeError as error:
            found.append(str(error))

    def look(model: torch.nn.Module) -> None:
        found.append(ms.has_strategy())
        backward(model)
        with strategy.replica() as context:
            found.append(context.replica_id_in_sync_group)
            backward(model)

    with strategy.replica():
        model = mirrored(strategy)
        thread = threading.Thread(target=look, args=(model,))
        thread.start()
        thread.join()
    assert found[0] is False
    assert found[-1] == RANK
    if SIZE > 1:
        assert "on the thread that has entered it" in found[1]
    assert all(parameter.grad is not None for parameter in model.parameters())


# Where ranks meet


def test_lazy_modules_are_mirrored_at_the_next_batch(strategy: ms.Strategy) -> None:
    with strategy.replica():
        with strategy.scope():
            torch.manual_seed(RANK)
            model = torch.nn.Sequential(torch.nn.LazyLinear(8), torch.nn.Linear(8, CLASSES))
        optimizer = None
        for x, y in strategy.experimental_distribute_dataset(loader()):
            if optimizer is None:  # ranks that have an example now know the shape
                model(torch.ones(1, FEATURES))
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                continue
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    for theirs in WORLD.allgather(flat.numpy()):
        assert np.array_equal(theirs, flat.numpy())


def test_buffers_in_a_state_dict(strategy: ms.Strategy) -> None:
    """Averaged by each backward, and when a loader ends. So one rank alone may evaluate and save."""
    distributed = strategy.experimental_distribute_dataset(
        DataLoader(examples(24 * SIZE), 6 * SIZE)
    )
    with strategy.replica():
        model = mirrored(strategy, torch.nn.BatchNorm1d(8))
        means = []
        for x, y in distributed:
            cross_entropy(model(x), y).backward()
            means.append(model.state_dict()["2.running_mean"].numpy().copy())
        train_mean = means[-1]
        for x, _ in distributed:  # statistics alone
            model(x)
        means.append(model.state_dict()["2.running_mean"].numpy().copy())
        if RANK == 0:
            copy.deepcopy(model).eval()(torch.ones(1, FEATURES))
            model.eval()(torch.ones(1, FEATURES))
            model.state_dict()
            model.train()
        for x, _ in distributed:
            with torch.no_grad():
                model(x)
            break
        own = model.state_dict()["2.running_mean"].numpy().copy()
    assert not np.array_equal(train_mean, means[-1])
    for theirs in WORLD.allgather(np.stack(means)):
        assert np.array_equal(theirs, np.stack(means))
    if SIZE > 1:  # written since, and read inside: the replica's own
        assert len({each.tobytes() for each in WORLD.allgather(own)}) == SIZE


@several
def test_a_rank_that_skips_a_batch_is_noticed(strategy: ms.Strategy) -> None:
    def skipping() -> None:
        with strategy.replica():
            model = mirrored(strategy)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for i, (x, y) in enumerate(strategy.experimental_distribute_dataset(loader())):
                if i == 1 and RANK == SIZE - 1:
                    continue
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()

    errors = errors_of_ranks(skipping)
    assert {name for name, _, _ in errors} == {"CollectiveMismatchError"}, errors
    assert all("a rank has skipped a backward" in message for _, message, _ in errors)
    assert all(f"rank {SIZE - 1}: run 3, 1 steps" in message for _, message, _ in errors), errors


@several
def test_loops_of_different_lengths(strategy: ms.Strategy) -> None:
    """A loader of the strategy's ends on all ranks at once; with others, ranks that go on get an error, as all do."""

    def unequal(batches: Any) -> int:
        steps = 0
        with strategy.replica():
            model = mirrored(strategy)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for x, y in batches:
                optimizer.zero_grad()
                cross_entropy(model(x), y, reduction="sum").backward()
                optimizer.step()
                steps += 1
            strategy.reduce("sum", 1.0, axis=None)
        return steps

    of_rank = DataLoader(examples(6 + 6 * RANK), 6)
    errors = errors_of_ranks(lambda: unequal(of_rank))
    assert {name for name, _, _ in errors} == {"CollectiveMismatchError"}, errors
    agreed = strategy.distribute_datasets_from_function(lambda context: of_rank)
    assert set(WORLD.allgather(unequal(agreed))) == {SIZE}
