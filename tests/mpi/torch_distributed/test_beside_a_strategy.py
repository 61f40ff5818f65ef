"""torch's default group beside a strategy: who makes it, what works over it, and what would count twice."""

import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler
from torch.utils.data.datapipes.iter import IterableWrapper

import mpistrat as ms
from mpistrat.torch_distributed import default_group
from support.rank_errors import errors_of_ranks

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
KINDS = (ms.MultiWorkerMirroredStrategy, ms.MirroredStrategy, ms.CentralStorageStrategy)
several_ranks = pytest.mark.mpi(min_size=2)


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def make_gloo(folder: Path, rank: int = RANK, size: int = SIZE) -> None:
    store = dist.FileStore(str(folder.with_name(f"store-{rank if size == 1 else ''}")), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


@pytest.mark.parametrize("kind", KINDS)
def test_a_strategy_makes_the_group_when_asked(kind: Any) -> None:
    kind()
    assert not dist.is_initialized()
    strategy = kind(torch_distributed=True)
    made = dist.group.WORLD
    assert (dist.get_backend(), dist.get_rank(), dist.get_world_size()) == ("mpistrat", RANK, SIZE)

    def step() -> torch.Tensor:
        mine = torch.full((3,), RANK + 1.0)
        work = dist.all_reduce(mine, async_op=True)
        total = ms.get_replica_context().all_reduce("sum", torch.ones(3))  # while that is under way
        work.wait()
        return mine + total

    expected = SIZE * (SIZE + 1) / 2 + SIZE
    assert strategy.run(step).tolist() == [expected] * 3
    kind(torch_distributed=True)
    assert dist.group.WORLD is made
    assert strategy.run(step).tolist() == [expected] * 3


def test_the_group_is_over_the_ranks_of_the_strategy() -> None:
    """Those with as even a rank as this one, the last one first."""
    comm = WORLD.Split(RANK % 2, -RANK)
    strategy = ms.MultiWorkerMirroredStrategy(comm=comm, torch_distributed=True)
    numbers = [None] * comm.size
    dist.all_gather_object(numbers, RANK)
    assert numbers == sorted((r for r in range(SIZE) if r % 2 == RANK % 2), reverse=True)
    assert dist.get_rank() == strategy.extended.communicator.rank
    dist.destroy_process_group()
    ms.MultiWorkerMirroredStrategy(torch_distributed=True)
    assert (dist.get_rank(), dist.get_world_size()) == (RANK, SIZE)
    comm.Free()


def test_a_group_of_the_program_is_used(directory: Path) -> None:
    make_gloo(directory)
    made = dist.group.WORLD
    ms.MultiWorkerMirroredStrategy(torch_distributed=True)
    assert dist.group.WORLD is made


@several_ranks
@pytest.mark.parametrize("how", ["reversed", "of one rank", "of some ranks"])
def test_a_group_over_other_ranks_is_an_error(directory: Path, how: str) -> None:
    if how == "reversed":
        make_gloo(directory, SIZE - 1 - RANK)
    elif how == "of one rank":
        make_gloo(directory, 0, 1)
    elif RANK > 0:
        make_gloo(directory, RANK - 1, SIZE - 1)
    errors = errors_of_ranks(lambda: ms.MultiWorkerMirroredStrategy(torch_distributed=True))
    last = {
        "reversed": f"rank {SIZE - 1} of the strategy is rank 0 of {SIZE} in it",
        "of one rank": f"rank {SIZE - 1} of the strategy is rank 0 of 1 in it",
        "of some ranks": "rank 0 of the strategy is in none",
    }
    for rank, (name, message, _) in enumerate(errors):
        assert name == "RuntimeError"
        assert f"on rank {rank} of {SIZE}" in message
        assert last[how] in message
        assert "leave out torch_distributed=True" in message
    ms.MultiWorkerMirroredStrategy()  # asks for nothing


@several_ranks
def test_two_groups_with_the_same_numbers_are_told_apart() -> None:
    """Each rank is in one of its own, with the number that it has in the strategy."""
    from torch.testing._internal.distributed import fake_pg

    assert fake_pg.FakeStore  # its import makes the backend known
    store = dist.HashStore()
    dist.init_process_group("fake", store=store, rank=RANK, world_size=SIZE)
    errors = errors_of_ranks(lambda: ms.MultiWorkerMirroredStrategy(torch_distributed=True))
    assert {name for name, _, _ in errors} == {"RuntimeError"}
    assert all(f"the ranks are in {SIZE} different groups" in text for _, text, _ in errors)


def test_under_mpistrat_run_every_strategy_has_the_group(
    monkeypatch: pytest.MonkeyPatch, directory: Path
) -> None:
    monkeypatch.setattr(default_group, "with_every_strategy", True)
    ms.MirroredStrategy()
    assert dist.get_backend() == "mpistrat"
    dist.destroy_process_group()
    make_gloo(directory, SIZE - 1 - RANK)
    ms.MirroredStrategy()  # a program's own stays, whatever it is over
    assert dist.get_backend() == "gloo"


def test_ranks_that_do_not_all_ask_are_told() -> None:
    make = lambda: ms.MultiWorkerMirroredStrategy(torch_distributed=RANK == 0)  # noqa: E731
    names = {name for name, _, _ in errors_of_ranks(make)}
    assert names == ({"CollectiveMismatchError"} if SIZE > 1 else {""})
    with pytest.raises(ValueError, match="torch_distributed must be True or False, got 'yes'"):
        ms.MirroredStrategy(torch_distributed="yes")  # type: ignore[arg-type]


def test_a_metric_says_once_that_it_counts_one_rank() -> None:
    """On rank 0 of the strategy that was made last. An older one, in which that rank is the last, is still there."""
    import torchmetrics

    comm = WORLD.Split(0, -RANK)
    older = ms.MirroredStrategy(comm=comm)
    strategy = ms.MultiWorkerMirroredStrategy()
    assert older.num_replicas_in_sync == SIZE

    def seen() -> Any:
        metric = torchmetrics.MeanMetric()
        metric(torch.tensor(float(RANK)))  # of a batch alone
        return metric

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        batch = seen()
        assert said == []
        means = WORLD.allgather(float(batch.compute()))
        seen().compute()
    assert means == [float(rank) for rank in range(SIZE)]
    assert len(said) == (SIZE > 1 and RANK == 0)
    for warning in said:
        assert warning.filename == __file__
        assert "MeanMetric.compute() of torchmetrics combines nothing" in str(warning.message)
    mean = sum(range(SIZE)) / SIZE
    states = strategy.reduce("sum", batch.metric_state, axis=None)
    assert states["mean_value"] / states["weight"] == mean
    ms.MultiWorkerMirroredStrategy(torch_distributed=True)
    assert seen().compute() == mean
    comm.Free()


def test_data_parallelism_around_a_mirrored_module_is_an_error() -> None:
    strategy = ms.MultiWorkerMirroredStrategy(torch_distributed=True)
    with strategy.scope():
        mirrored = torch.nn.Linear(2, 1)
    later = torch.nn.Sequential(torch.nn.Linear(2, 1))
    strategy.mirror(later)
    own = torch.nn.Linear(2, 1)
    wrapped = DistributedDataParallel(own)

    def in_scope() -> None:
        with strategy.scope():
            DistributedDataParallel(torch.nn.Linear(2, 1))

    fsdp = lambda: torch.distributed.fsdp.FullyShardedDataParallel(  # noqa: E731
        mirrored, device_id=torch.device("cpu")
    )
    calls = {
        "DistributedDataParallel": [
            lambda: DistributedDataParallel(mirrored),
            lambda: DistributedDataParallel(later[0]),
            in_scope,
            lambda: strategy.mirror(wrapped),
        ],
        "FullyShardedDataParallel": [fsdp],
    }
    for name, call in ((name, call) for name, of_it in calls.items() for call in of_it):
        for rank, (kind, message, _) in enumerate(errors_of_ranks(call) if SIZE > 1 else ()):
            assert kind == "ValueError"
            assert f"rank {rank}: {name} is put around a Linear that the strategy" in message
            assert f"Leave {name} out" in message
    # What the strategy does not have is DDP's.
    wrapped(torch.full((1, 2), RANK + 1.0)).sum().backward()
    assert own.weight.grad.tolist() == [[(SIZE + 1) / 2] * 2]


def test_data_parallelism_around_a_prepared_module_without_a_group_is_an_error() -> None:
    """Torch alone would ask for a group, with which gradients were reduced twice."""
    model = ms.MultiWorkerMirroredStrategy().prepare(torch.nn.Linear(2, 1))
    for kind, text, _ in errors_of_ranks(lambda: DistributedDataParallel(module=model)):
        if SIZE > 1:
            assert kind == "ValueError"
            assert "Leave DistributedDataParallel out" in text
            assert "keep the model out of prepare()" in text
    with pytest.raises(ValueError, match="init_process_group"):  # torch's own
        DistributedDataParallel(torch.nn.Linear(2, 1))


class Shard(BatchSampler):
    """As accelerate's."""

    def __init__(self) -> None:
        super().__init__(SequentialSampler(range(8)), 4, False)
        self.num_processes, self.process_index = 2, 0


@pytest.mark.parametrize("how", ["sampler", "no batches", "batch sampler"])
def test_a_sampler_that_shares_out_distributed_data_is_an_error(how: str) -> None:
    strategy = ms.MultiWorkerMirroredStrategy(torch_distributed=True)
    examples = torch.arange(8)
    if how == "batch sampler":
        loader = DataLoader(examples, batch_sampler=Shard())
    else:
        loader = DataLoader(
            examples,
            batch_size=None if how == "no batches" else 4,
            sampler=DistributedSampler(examples),
        )
    name = "Shard" if how == "batch sampler" else "DistributedSampler"
    with pytest.raises(ValueError, match=f"has a {name}, which gives each rank a share"):
        strategy.experimental_distribute_dataset(loader)


@pytest.mark.filterwarnings("ignore:each of the:UserWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_each_element_of_a_datapipe_is_read_once(workers: int) -> None:
    """torch shares out a datapipe over the default group, and the strategy what it reads."""
    strategy = ms.MultiWorkerMirroredStrategy(torch_distributed=True)
    pipe = IterableWrapper(range(8 * SIZE)).shuffle().sharding_filter().batch(SIZE).collate()
    steps = strategy.experimental_distribute_dataset(
        DataLoader(pipe, batch_size=None, num_workers=workers)
    )
    orders = []
    for _ in range(2):
        read = WORLD.allgather([step.tolist() for step in steps])
        orders.append(read)
        flat = itertools.chain.from_iterable(itertools.chain.from_iterable(read))
        assert sorted(flat) == list(range(8 * SIZE))
    assert orders[0] != orders[1]
    torch.manual_seed(0)  # as others find it
