"""Going on in the middle of an epoch: nothing is repeated, nothing is skipped, on any number of ranks."""

import gc
import itertools
import multiprocessing
import pickle

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import mpistrat as ms

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
EXAMPLES, BATCH = 60, 8
FILES = [range(10 * i, 10 * i + 7 + i) for i in range(8)]  # examples, as the reader tells them
IN_FILES = sorted(itertools.chain.from_iterable(FILES))


def shuffled_loader(**kwargs):
    return DataLoader(TensorDataset(torch.arange(EXAMPLES)), BATCH, shuffle=True, **kwargs)


def own_generator():
    return shuffled_loader(generator=torch.Generator().manual_seed(5))


def with_workers():
    return shuffled_loader(num_workers=1, generator=torch.Generator().manual_seed(5))


def arrays():
    return ms.input.BatchedDataset(np.arange(EXAMPLES), BATCH, shuffle=True)


def batches():
    return list(np.arange(EXAMPLES).reshape(-1, BATCH // 2))


def files():
    return ms.input.FileDataset(FILES, iter, BATCH, shuffle=True)


class Shuffled(IterableDataset):
    """Examples in an order of its own of each epoch, the same on all ranks."""

    def __iter__(self):
        return iter(torch.randperm(EXAMPLES))


def stream():
    return DataLoader(Shuffled(), BATCH)


SOURCES = {
    "stream": (stream, range(EXAMPLES)),
    "global generator": (shuffled_loader, range(EXAMPLES)),
    "own generator": (own_generator, range(EXAMPLES)),
    "workers": (with_workers, range(EXAMPLES)),
    "arrays": (arrays, range(EXAMPLES)),
    "batches": (batches, range(EXAMPLES)),
    "files": (files, IN_FILES),
}
every_source = pytest.mark.parametrize("source", SOURCES)
reads_everything = pytest.mark.filterwarnings("ignore:each of the:UserWarning")


def distributed(source, comm=None):
    strategy = ms.MultiWorkerMirroredStrategy(comm=comm)
    return strategy.experimental_distribute_dataset(SOURCES[source][0]())


def examples(steps):
    """Of each step, what this rank read."""
    read = []
    for step in steps:
        batch = step[0] if isinstance(step, (list, tuple)) else step
        read.append(np.asarray(batch).tolist())
    return read


def of_all(comm, mine):
    return list(itertools.chain.from_iterable(itertools.chain(*comm.allgather(mine))))


@reads_everything
@every_source
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_restart_reads_the_rest(source, steps):
    """As if it had not been stopped, for the next epoch too; its state is picklable and the same on all ranks."""
    torch.manual_seed(1)
    before = distributed(source)
    examples(before)  # an epoch
    iterator = iter(before)
    head = examples(itertools.islice(iterator, steps))
    state = pickle.loads(pickle.dumps(iterator.state_dict()))
    assert state["epoch"] == 1
    assert state["steps"] == steps
    assert len({pickle.dumps((s["epoch"], s["steps"])) for s in WORLD.allgather(state)}) == 1
    tail, following = examples(iterator), examples(before)

    torch.manual_seed(99)
    after = distributed(source)
    after.load_state_dict(state)
    assert examples(after) == tail
    if source not in (
        "global generator",
        "stream",
    ):  # whose next epoch belongs to the program's random numbers
        assert examples(after) == following
    assert sorted(of_all(WORLD, [*head, *tail])) == list(SOURCES[source][1])


@reads_everything
@pytest.mark.mpi(min_size=2)
@every_source
def test_a_restart_on_fewer_ranks_reads_the_rest(source):
    torch.manual_seed(1)
    iterator = iter(distributed(source))
    head = of_all(WORLD, examples(itertools.islice(iterator, 2)))
    state = WORLD.bcast(iterator.state_dict())

    some = WORLD.Split(RANK < SIZE - 1, RANK)  # all but the last, and the last alone
    torch.manual_seed(99)
    after = distributed(source, some)
    it = iter(after)
    it.load_state_dict(state)
    tail = of_all(some, examples(it))
    assert sorted(head + tail) == list(SOURCES[source][1])
    assert sorted(of_all(some, examples(after))) == list(SOURCES[source][1])


def test_the_dataset_knows_where_its_iterator_stands():
    data = distributed("arrays")
    for step, _ in enumerate(data, 1):
        if step == 3:
            break
    assert data.state_dict()["steps"] == 3
    again = distributed("arrays")
    again.load_state_dict(data.state_dict())
    assert len(examples(again)) == len(data) - 3


def test_the_global_generators_go_on_where_they_were():
    """Restoring the order of an epoch leaves the program's own random numbers alone."""
    torch.manual_seed(1)
    first = distributed("global generator")
    iterator = iter(first)
    next(iterator)
    state = iterator.state_dict()
    torch.manual_seed(2)
    expected = torch.rand(3)
    torch.manual_seed(2)
    second = distributed("global generator")
    second.load_state_dict(state)
    next(iter(second))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("source", ["global generator", "own generator", "workers", "stream"])
def test_a_checkpoint_between_two_epochs_repeats_no_order(source, directory):
    """The epochs after the restart have the orders of a run without a restart. So have the random numbers of rank 0."""

    def trained(name, seed, epochs):
        """Train up to a number of epochs, with a checkpoint after each. Returns: what each epoch read and drew."""
        torch.manual_seed(1 if source == "stream" else seed + RANK)
        data = distributed(source)
        epoch = ms.Variable(0)
        checkpoint = ms.checkpoint.Checkpoint(data=data, epoch=epoch)
        manager = ms.checkpoint.CheckpointManager(checkpoint, directory / name)
        manager.restore_or_initialize()
        found = []
        while int(epoch) < epochs:
            found.append((examples(data), torch.rand(2).tolist()[: 2 * (RANK == 0)]))
            epoch.assign_add(1)
            manager.save(int(epoch))
        return found

    whole = trained("whole", 1, 4)
    assert trained("parts", 1, 2) + trained("parts", 8, 4) == whole
    assert len({str(order) for order, _ in whole}) == 4


SEEDED = {
    "torch": (shuffled_loader, lambda loader, epoch: torch.manual_seed(epoch)),
    "loader": (own_generator, lambda loader, epoch: loader.generator.manual_seed(epoch)),
    "stream": (stream, lambda loader, epoch: torch.manual_seed(epoch)),
    "own numbers": (shuffled_loader, lambda loader, epoch: torch.rand(3)),
}


@pytest.mark.parametrize("how", SEEDED)
def test_a_program_that_seeds_each_epoch(how, directory):
    """As without a restart: a seed, or a draw, between the restore and the epoch counts."""

    def trained(name, epochs):
        make, begin = SEEDED[how]
        torch.manual_seed(1)
        loader = make()
        data = ms.MultiWorkerMirroredStrategy().experimental_distribute_dataset(loader)
        epoch = ms.Variable(0)
        checkpoint = ms.checkpoint.Checkpoint(data=data, epoch=epoch)
        manager = ms.checkpoint.CheckpointManager(checkpoint, directory / name)
        manager.restore_or_initialize()
        found = []
        while int(epoch) < epochs:
            begin(loader, 7 + int(epoch))
            found.append((examples(data), torch.rand(2).tolist()))
            epoch.assign_add(1)
            manager.save(int(epoch))
        return found

    whole = trained("whole", 4)
    assert trained("parts", 2) + trained("parts", 4) == whole
    assert len({str(order) for order, _ in whole}) == 4


def test_a_load_leaves_the_program_its_random_numbers():
    """Each rank its own; only the order of the loader that was loaded is repeated."""
    strategy = ms.MultiWorkerMirroredStrategy()
    torch.manual_seed(1 + RANK)
    train, shown = map(strategy.experimental_distribute_dataset, [shuffled_loader(), arrays()])
    start, rows, found = train.state_dict(), shown.state_dict(), []
    for _ in range(3):
        found.append((examples(train), torch.rand(2).tolist()))
        shown.load_state_dict(rows)
        examples(shown)
    assert len({str(order) for order, _ in found}) == 3
    assert len({str(numbers) for _, numbers in found}) == 3
    before = torch.get_rng_state()
    train.load_state_dict(start)
    assert torch.equal(torch.get_rng_state(), before)
    assert examples(train) == found[0][0]
    numbers = WORLD.allgather(torch.rand(2).tolist())
    assert len({str(numbers_of_rank) for numbers_of_rank in numbers}) == SIZE


def test_a_checkpoint_after_a_look_at_the_first_step(directory):
    """The look has drawn the order already: it is the order of the restart, too."""

    def begun(name):
        torch.manual_seed(1)
        data = distributed("global generator")
        manager = ms.checkpoint.CheckpointManager(
            ms.checkpoint.Checkpoint(data=data), directory / name
        )
        return data, manager

    data, manager = begun("looked")
    assert data.element_spec is not None
    manager.save(0)
    whole = [examples(data), examples(data)]
    data, manager = begun("looked")
    torch.manual_seed(99)
    manager.restore_or_initialize()
    assert [examples(data), examples(data)] == whole


def persistent(**kwargs):
    return shuffled_loader(num_workers=1, persistent_workers=True, **kwargs)


PERSISTENT = {
    "global generator": lambda strategy: strategy.experimental_distribute_dataset(persistent()),
    "own generator": lambda strategy: strategy.experimental_distribute_dataset(
        persistent(generator=torch.Generator().manual_seed(5))
    ),
    "local batches": lambda strategy: strategy.prepare(persistent(), local_batches=True),
}


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("kind", PERSISTENT)
def test_persistent_workers_of_an_earlier_epoch(kind, steps):
    """They drew a seed in the first epoch only. Those of the restart draw none; so the order of later epochs holds."""
    strategy = ms.MultiWorkerMirroredStrategy()
    torch.manual_seed(1)
    before = PERSISTENT[kind](strategy)
    examples(before)
    iterator = iter(before)
    examples(itertools.islice(iterator, steps))
    state, numbers = iterator.state_dict(), torch.get_rng_state()
    tail, following = examples(iterator), examples(before)

    torch.manual_seed(99)
    after = PERSISTENT[kind](strategy)
    after.load_state_dict(state)
    torch.set_rng_state(numbers)  # as a checkpoint does
    assert [examples(after), examples(after)] == [tail, following]


def sampled(context):
    mine = TensorDataset(torch.arange(context.input_pipeline_id, EXAMPLES, SIZE))
    return DataLoader(mine, 4, sampler=DistributedSampler(mine, 1, 0))


def shuffled(context):
    mine = TensorDataset(torch.arange(context.input_pipeline_id, EXAMPLES, SIZE))
    return DataLoader(mine, 4, shuffle=True)


def batched(context):
    mine = np.arange(context.input_pipeline_id, EXAMPLES, SIZE)
    return ms.input.BatchedDataset(mine, 4, shuffle=True)


def streamed(context):
    mine = torch.arange(context.input_pipeline_id, EXAMPLES, SIZE)

    class Mine(IterableDataset):
        def __iter__(self):
            return iter(mine[torch.randperm(len(mine))])

    return DataLoader(Mine(), 4)


@pytest.mark.parametrize("devices", [("cpu:0",), ("cpu:0", "cpu:1")], ids=["k=1", "k=2"])
@pytest.mark.parametrize("make", [sampled, shuffled, batched, streamed])
def test_what_a_function_made_is_begun_again_in_its_order(make, devices):
    """In a later epoch, whose shuffle is another; each rank has random numbers of its own."""

    def all_of(steps):
        """Of each step, what this rank's replicas read."""
        return [
            [np.asarray(x[0] if isinstance(x, (list, tuple)) else x).tolist() for x in parts]
            for parts in map(strategy.experimental_local_results, steps)
        ]

    strategy = ms.MultiWorkerMirroredStrategy(devices=devices)
    torch.manual_seed(RANK)
    before = strategy.distribute_datasets_from_function(make)
    first = all_of(before)
    iterator = iter(before)
    head = all_of(itertools.islice(iterator, 2))
    state = pickle.loads(pickle.dumps(iterator.state_dict()))
    tail = all_of(iterator)
    assert head + tail != first
    flat = [x for step in head + tail for part in step for x in part]
    assert sorted(flat) == list(range(RANK, EXAMPLES, SIZE))

    torch.manual_seed(99)
    after = strategy.distribute_datasets_from_function(make)
    after.load_state_dict(state)
    assert all_of(after) == tail


@pytest.mark.parametrize("workers", [0, 1])
def test_two_replicas_of_a_rank_go_on(workers):
    def make():
        generator = torch.Generator().manual_seed(5)
        loader = shuffled_loader(num_workers=workers, generator=generator)
        return strategy.experimental_distribute_dataset(loader)

    def read(steps):
        mine = [
            np.asarray(part[0]).tolist()
            for step in steps
            for part in strategy.experimental_local_results(step)
        ]
        return of_all(WORLD, mine)

    strategy = ms.MultiWorkerMirroredStrategy(devices=("cpu:0", "cpu:1"))
    iterator = iter(make())
    head = read(itertools.islice(iterator, 3))
    again = make()
    again.load_state_dict(iterator.state_dict())
    tail = read(again)
    assert tail == read(iterator)
    assert sorted(head + tail) == list(range(EXAMPLES))


@pytest.mark.parametrize("from_function", [False, True])
def test_an_iteration_that_is_left_early_ends_its_workers_at_once(from_function):
    """Not when the garbage collector comes, which takes 5 s over it."""
    strategy = ms.MultiWorkerMirroredStrategy()
    before = set(multiprocessing.active_children())
    loader = shuffled_loader(num_workers=1)
    if from_function:
        data = strategy.distribute_datasets_from_function(lambda context: loader)
    else:
        data = strategy.experimental_distribute_dataset(loader)
    gc.disable()
    try:
        for _ in data:
            (worker,) = set(multiprocessing.active_children()) - before
            break
        state = data.state_dict()
        del data
        assert not worker.is_alive()
    finally:
        gc.enable()
    assert state["steps"] == 1


@pytest.mark.mpi(min_size=2)
def test_what_each_rank_chose_needs_as_many_ranks():
    strategy = ms.MultiWorkerMirroredStrategy()

    def make(context):
        return [np.full(2, i) for i in range(4)]

    data = strategy.distribute_datasets_from_function(make)
    next(iter(data))
    state = data.state_dict()
    again = strategy.distribute_datasets_from_function(make)
    again.load_state_dict(state)
    assert [int(x[0]) for x in again] == [1, 2, 3]
    with pytest.raises(ValueError, match=rf"saved on {SIZE + 1} ranks, this is {SIZE}"):
        again.load_state_dict({**state, "ranks": SIZE + 1})
