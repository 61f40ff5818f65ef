"""Where the size of a part, or parts that differ, make gradients wrong, the first rank says so, and nowhere else."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch.utils.data import DataLoader, TensorDataset

import mpistrat as ms
from support.rank_errors import errors_of_ranks

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
BATCH = 4 * SIZE

pytestmark = pytest.mark.usefixtures("one_thread_per_rank")


class Program:
    """A model, and the loss of each of a part's examples. Context: replica."""

    def __init__(self, strategy: ms.Strategy) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.model = torch.nn.Linear(2, 1)

    def losses(self, part: torch.Tensor) -> torch.Tensor:
        return self.model(part).square().flatten()

    def part(self, size: int) -> torch.Tensor:
        part: torch.Tensor = self.strategy.shard(torch.ones(size, 2))
        return part

    def average(self, part: torch.Tensor, size: int | None) -> None:
        ms.compute_average_loss(self.losses(part), global_batch_size=size).backward()


def loaded(program: Program, size: int = BATCH) -> torch.Tensor:
    """This replica's part of a loader's batch, whose iterator the program keeps."""
    loader = DataLoader(TensorDataset(torch.ones(size, 2)), size)
    program.iterator = iter(program.strategy.prepare(loader))  # type: ignore[attr-defined]
    part: torch.Tensor = next(program.iterator)[0]  # type: ignore[attr-defined]
    return part


def sharded(program: Program, size: int = BATCH) -> torch.Tensor:
    return program.part(size)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("part_of", [loaded, sharded])
@pytest.mark.parametrize(("batch", "size"), [(BATCH, 4), (BATCH + 1, 5)])
def test_one_part_s_size_as_that_of_the_batch(
    part_of: Callable[..., torch.Tensor], batch: int, size: int, notices: list[str]
) -> None:
    """Once, however often it is passed."""
    strategy = ms.MultiWorkerMirroredStrategy()
    with strategy.replica():
        program = Program(strategy)
        for _ in range(2):
            program.average(part_of(program, batch), size)
    (text,) = notices if RANK == 0 else [""]
    times = f"{batch / size:.3g} times as large"
    words = (
        f"global_batch_size={size} is",
        f"{batch} examples",
        times,
        f"pass global_batch_size={batch}",
    )
    assert all(word in text for word in words) == (RANK == 0)


def accumulates(program: Program) -> None:
    for _ in range(2):
        program.average(loaded(program), 2 * BATCH)


def divides_its_part(program: Program) -> None:
    """Each half of the part makes a step of its own."""
    for half in loaded(program).chunk(2):
        program.average(half, BATCH // 2)


def scales_by_another_loader(program: Program) -> None:
    """As in semi-supervised learning: examples without labels count by the number of those that have some."""
    labelled = program.strategy.prepare(DataLoader(TensorDataset(torch.ones(BATCH, 2)), BATCH))
    for _ in labelled:
        program.average(loaded(program, BATCH * SIZE), BATCH)


def evaluates(program: Program) -> None:
    with torch.no_grad():
        part = program.part(17 * SIZE + 1)
        ms.compute_average_loss(program.losses(part), global_batch_size=len(part))
        ms.compute_average_loss(program.losses(part))
        ms.compute_average_loss(program.losses(loaded(program)), global_batch_size=4)


def scales_right(program: Program) -> None:
    """Uneven parts count right."""
    program.average(program.part(18 * SIZE + 1), 18 * SIZE + 1)
    program.average(loaded(program, BATCH + 1), BATCH + 1)
    program.average(loaded(program, BATCH + 1), None)


@pytest.mark.parametrize(
    "program",
    [accumulates, divides_its_part, scales_by_another_loader, evaluates, scales_right],
)
def test_nothing_is_said_of_other_sizes(
    program: Callable[[Program], None], notices: list[str]
) -> None:
    strategy = ms.MultiWorkerMirroredStrategy()
    with strategy.replica():
        program(Program(strategy))
    assert notices == []


def test_nothing_is_said_where_the_rule_fits(notices: list[str]) -> None:
    """A replica's own mean with the mean of gradients; a sum that the program scales itself with their sum."""
    strategy = ms.MultiWorkerMirroredStrategy(gradients="mean")
    program = Program(strategy)
    strategy.run(lambda: program.average(program.part(BATCH), 4))
    strategy = ms.MultiWorkerMirroredStrategy(gradients="sum")
    other, size = Program(strategy), 19 * SIZE + 1
    strategy.run(lambda: (other.losses(other.part(size)).sum() / size).backward())
    assert notices == []


def mean(program: Program, part: torch.Tensor) -> None:
    program.losses(part).mean().backward()


def guess(program: Program, part: torch.Tensor) -> None:
    program.average(part, None)


def count_as_parts_do(program: Program, part: torch.Tensor) -> None:
    program.average(part, len(part) * SIZE)


@pytest.mark.parametrize(("step", "times"), [(mean, 11), (guess, 12), (count_as_parts_do, 13)])
def test_uneven_parts_that_count_alike(step: Any, times: int, notices: list[str]) -> None:
    """It is said by the backward, or by the loss whose scale is wrong, once for each size."""
    strategy = ms.MultiWorkerMirroredStrategy()
    size, expected = times * SIZE + 1, int(RANK == 0 and SIZE > 1)
    with strategy.replica():
        program = Program(strategy)
        for t in range(2):
            part = program.part(size)
            assert len(notices) == (expected if t else 0)
            step(program, part)
            assert len(notices) == expected
    assert all(
        f"dimension 0, of size {size}, does not divide by {SIZE}" in text for text in notices
    )


def test_uneven_parts_in_run(notices: list[str]) -> None:
    strategy = ms.MultiWorkerMirroredStrategy(gradients="mean")
    program = Program(strategy)
    strategy.run(lambda: mean(program, program.part(15 * SIZE + 1)))
    assert len(notices) == (RANK == 0 and SIZE > 1)


def two_loaders(strategy: ms.Strategy, size: int, other: int) -> list[float]:
    """Losses without a size, each right where the parts of the two steps tell them apart."""
    batches = [TensorDataset(torch.ones(n, 1)) for n in (size, other)]
    loaders = [strategy.prepare(DataLoader(data, len(data))) for data in batches]
    scale = torch.ones((), requires_grad=True)
    losses = []
    for (x,), (z,) in zip(*loaders, strict=True):

        def step(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
            total = sum(ms.compute_average_loss(part[:, 0] * scale) for part in (x, z))
            return ms.get_replica_context().all_reduce("sum", total.detach())

        losses.append(float(strategy.run(step, (x, z))))
    return losses


@pytest.mark.mpi(min_size=2)
def test_two_loaders_whose_parts_do_not_tell_the_size() -> None:
    strategy = ms.MultiWorkerMirroredStrategy(gradients="sum")
    errors = errors_of_ranks(lambda: two_loaders(strategy, 5 * SIZE - 1, 5 * SIZE))
    assert {name for name, _, _ in errors} == {"ValueError"}
    words = f"[{5 * SIZE - 1}, {5 * SIZE}] examples", f"by {SIZE} replicas", "global_batch_size=…"
    assert all(word in text for _, text, _ in errors for word in words)


def test_two_loaders_of_whole_parts() -> None:
    strategy = ms.MultiWorkerMirroredStrategy(gradients="sum")
    assert two_loaders(strategy, 2 * SIZE, 7 * SIZE) == [2.0]
    assert two_loaders(strategy, SIZE + 1, SIZE + 1) == [2.0]


def test_loaders_that_take_turns() -> None:
    """Each backward is of the last step alone."""
    strategy = ms.MultiWorkerMirroredStrategy(gradients="sum")
    with strategy.scope():
        model = torch.nn.Linear(1, 1, bias=False)
    sizes = (5 * SIZE - 1, 5 * SIZE)
    iterators = [
        iter(strategy.prepare(DataLoader(TensorDataset(torch.ones(2 * n, 1)), n))) for n in sizes
    ]
    for _ in range(2):
        for iterator in iterators:
            model.zero_grad()
            strategy.run(
                lambda x: ms.compute_average_loss(model(x)[:, 0]).backward(), next(iterator)
            )
            assert model.weight.grad.item() == pytest.approx(1)


@pytest.mark.parametrize("kind", [torch.ones, np.ones])
def test_shard_of_arrays_of_several_sizes(kind: Any) -> None:
    strategy = ms.MultiWorkerMirroredStrategy()
    nest = {"examples": kind((2, 4 * SIZE)), "weights": kind((2, 3))}
    with pytest.raises(
        ValueError, match=rf"divides dimension 1 .*got \[{4 * SIZE}, 3\]. Leave out"
    ):
        strategy.shard(nest, dim=1)
    assert [part.shape[0] for part in strategy.shard(list(nest.values()))] in (
        [2, 2],
        [1, 1],
        [0, 0],
    )
