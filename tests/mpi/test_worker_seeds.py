"""What workers of a DataLoader draw: rank 0's what torch's do; others something else, if examples are a rank's own."""

import random

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    get_worker_info,
)

import mpistrat as ms

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
EXAMPLES = 2 * SIZE
OFF = ms.InputOptions(experimental_auto_shard_policy="OFF")
at_init = 0.0


def start(worker):
    """A `worker_init_fn`, which draws."""
    global at_init
    at_init = random.random()


def drawn():
    """Of each generator, and what says how it was seeded."""
    seed = get_worker_info().seed
    assert torch.initial_seed() == seed
    numbers = [at_init, random.random(), torch.rand(()).item(), np.random.rand()]
    return torch.tensor([*numbers, *divmod(seed, 1 << 32)], dtype=torch.float64)


class Augmented(Dataset):
    def __len__(self):
        return EXAMPLES

    def __getitem__(self, index):
        return drawn()


class Stream(IterableDataset):
    def __iter__(self):
        return (drawn() for _ in range(EXAMPLES))


def loader(dataset, batch_size, **how):
    how = {"num_workers": 1, "worker_init_fn": start, "multiprocessing_context": "fork", **how}
    return DataLoader(dataset, batch_size, **how)


def share():
    return DistributedSampler(Augmented(), SIZE, RANK, shuffle=False)


# How a rank loads examples of its own, as many as one rank would.
OWN = {
    "map-style": lambda s: s.prepare(loader(Augmented(), 2 * SIZE)),
    "local_batches": lambda s: s.prepare(
        loader(Augmented(), 2, sampler=share()), local_batches=True
    ),
    "OFF": lambda s: s.experimental_distribute_dataset(loader(Augmented(), 2 * SIZE), OFF),
    "function": lambda s: s.distribute_datasets_from_function(lambda _: loader(Augmented(), 2)),
}
# A stream that shuffles by these numbers must be the same everywhere, if ranks take turns in it.
COMMON = {
    "all": lambda s: s.prepare(loader(Stream(), 2 * SIZE)),
    "local_batches": lambda s: s.prepare(loader(Stream(), 2), local_batches=True),
    "function": lambda s: s.distribute_datasets_from_function(lambda _: loader(Stream(), 2)),
}


@pytest.fixture(scope="module")
def strategy():
    return ms.MultiWorkerMirroredStrategy()


def first_drawn(distributed):
    """The numbers of the first example, and what the program draws next."""
    torch.manual_seed(5)
    batches = iter(distributed)
    return np.asarray(next(batches))[0].tolist(), torch.rand(()).item()


@pytest.fixture(scope="module")
def torchs():
    return first_drawn(loader(Augmented(), 2))


@pytest.mark.parametrize("case", OWN)
def test_ranks_with_examples_of_their_own_draw_other_numbers(strategy, case, torchs):
    mine, next_number = first_drawn(OWN[case](strategy))
    of_ranks = WORLD.allgather(mine)
    assert of_ranks[0] == torchs[0]
    for numbers in list(zip(*of_ranks, strict=True))[:4]:
        assert len(set(numbers)) == SIZE
    low_words = [numbers[-1] for numbers in of_ranks]  # which programs give NumPy
    assert len(set(low_words)) == SIZE
    assert next_number == torchs[1]


@pytest.mark.filterwarnings("ignore:each of the:UserWarning")
@pytest.mark.parametrize("case", COMMON)
def test_workers_of_streams_draw_torchs_numbers(strategy, case, torchs):
    mine, next_number = first_drawn(COMMON[case](strategy))
    if case == "all":  # each gets its part of what all read
        assert mine[-2:] == torchs[0][-2:]
    else:
        assert mine == torchs[0]
    assert next_number == torchs[1]


def test_an_epoch_that_is_begun_again_draws_the_same(strategy):
    distributed = OWN["map-style"](strategy)
    torch.manual_seed(6)
    state = distributed.state_dict()
    mine = next(iter(distributed)).tolist()
    again = OWN["map-style"](strategy)
    again.load_state_dict(state)
    assert next(iter(again)).tolist() == mine
