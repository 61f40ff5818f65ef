"""Files that differ much in length, stopped and gone on with twice, by changing numbers of ranks."""

import itertools
import random

import pytest
from mpi4py import MPI

import mpistrat as ms

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size


def files_of(rng):
    """Up to nine files of up to 30 examples, each example a number of its own."""
    numbers = itertools.count()
    sizes = [rng.randint(0, 30) for _ in range(rng.randint(max(SIZE, 2), 9))]
    return [list(itertools.islice(numbers, size)) for size in sizes]


def read(strategy, files, batch_size, state=None, steps=None):
    """What each rank of `strategy` reads of an epoch in `steps` steps, as flat lists, and the state after them."""
    if state is not None and state["epoch"] == 1:  # the epoch was read to its end
        return [[] for _ in range(strategy.extended.communicator.size)], state
    dataset = ms.input.FileDataset(files, iter, batch_size, shuffle=True, seed=3)
    distributed = strategy.experimental_distribute_dataset(dataset)
    if state is not None:
        distributed.load_state_dict(state)
    batches = [batch.tolist() for batch in itertools.islice(iter(distributed), steps)]
    everyone = strategy.extended.communicator.all_gather_object(batches)
    return everyone, distributed.state_dict()


def flat(everyone):
    return list(itertools.chain.from_iterable(itertools.chain.from_iterable(everyone)))


@pytest.mark.parametrize("seed", range(8))
def test_each_rank_goes_on_with_its_own_files(seed):
    """On as many ranks a restart changes nothing, however far apart the ranks are in their files."""
    rng = random.Random(seed)
    files, batch_size, steps = files_of(rng), rng.randint(SIZE, 9), rng.randint(0, 6)
    strategy = ms.MultiWorkerMirroredStrategy()
    whole, _ = read(strategy, files, batch_size)
    first, state = read(strategy, files, batch_size, steps=steps)
    second, state = read(strategy, files, batch_size, state, steps=2)
    third, _ = read(strategy, files, batch_size, state)
    assert [a + b + c for a, b, c in zip(first, second, third, strict=True)] == whole
    assert sorted(flat(whole)) == list(itertools.chain(*files))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("few_first", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_more_and_fewer_ranks_read_the_rest(seed, few_first):
    rng = random.Random(seed)
    files, batch_size, steps = files_of(rng), rng.randint(SIZE, 9), rng.randint(0, 6)
    all_ranks = ms.MultiWorkerMirroredStrategy()
    is_one_of_few = RANK < SIZE - 1
    comm = WORLD.Split(is_one_of_few, RANK)
    few = ms.MultiWorkerMirroredStrategy(comm=comm)  # the last rank does it alone, too

    def parts():
        state = None
        for use_few, count in ((few_first, steps), (not few_first, 2), (few_first, None)):
            strategy = few if use_few else all_ranks
            everyone, state = read(strategy, files, batch_size, state, count)
            # What the last rank did alone does not count.
            yield WORLD.bcast(flat(everyone))
            state = WORLD.bcast(state)

    assert sorted(itertools.chain(*parts())) == list(itertools.chain(*files))
    comm.Free()
