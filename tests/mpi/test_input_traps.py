"""What has lost examples, or read them twice, without a word."""

import io
import itertools
import os
import random
import threading

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    TensorDataset,
)

import mpistrat as ms
from mpistrat.compat import v1
from support.process_ids import ProcessIds

WORLD = MPI.COMM_WORLD
EXAMPLES = 24
DATASET = TensorDataset(torch.arange(EXAMPLES))


@pytest.fixture(scope="module")
def strategy():
    return ms.MultiWorkerMirroredStrategy()


def read(steps):
    mine = []
    for step in steps:
        mine += np.asarray(step[0] if isinstance(step, (list, tuple)) else step).tolist()
    return sorted(itertools.chain(*WORLD.allgather(mine)))


def slow_files():
    return ms.input.FileDataset([range(6 * i, 6 * i + 6) for i in range(4)], iter, 4)


SOURCES = {
    "loader": lambda: DataLoader(DATASET, 4, shuffle=True),
    "files": slow_files,
    "generator": lambda: (np.arange(4 * i, 4 * i + 4) for i in range(6)),
}


@pytest.mark.filterwarnings("ignore:each of the:UserWarning")
@pytest.mark.parametrize("source", SOURCES)
def test_asking_for_the_spec_reads_nothing_away(strategy, source):
    distributed = strategy.experimental_distribute_dataset(SOURCES[source]())
    assert distributed.element_spec is not None
    assert read(distributed) == list(range(EXAMPLES))


@pytest.mark.parametrize("source", ["loader", "files"])
def test_asking_for_the_spec_keeps_a_restart(strategy, source):
    torch.manual_seed(1)
    first = iter(strategy.experimental_distribute_dataset(SOURCES[source]()))
    head = read([next(first), next(first)])
    torch.manual_seed(2)
    second = strategy.experimental_distribute_dataset(SOURCES[source]())
    second.load_state_dict(first.state_dict())
    assert second.element_spec is not None
    assert second.state_dict()["steps"] == 2
    assert sorted(head + read(second)) == list(range(EXAMPLES))


@pytest.mark.parametrize("source", ["loader", "files"])
def test_an_epoch_that_was_left_early_does_not_disturb_the_next(strategy, source):
    distributed = strategy.experimental_distribute_dataset(SOURCES[source]())
    abandoned = iter(distributed)
    next(abandoned)
    iterator = iter(distributed)
    head = read([next(iterator)])
    again = strategy.experimental_distribute_dataset(SOURCES[source]())
    again.load_state_dict(iterator.state_dict())
    assert sorted(head + read(again)) == list(range(EXAMPLES))


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("kind", [torch.arange, np.arange])
def test_a_batch_sampler_of_arrays(strategy, kind, size):
    batches = [kind(first, first + size) for first in range(0, EXAMPLES, size)]
    loader = DataLoader(DATASET, batch_sampler=batches)
    assert read(strategy.experimental_distribute_dataset(loader)) == list(range(EXAMPLES))


def test_a_distributed_sampler_inside_another_is_refused(strategy):
    sampler = BatchSampler(DistributedSampler(DATASET, 2, 0), 4, False)
    with pytest.raises(ValueError, match="DistributedSampler"):
        strategy.experimental_distribute_dataset(DataLoader(DATASET, batch_sampler=sampler))


def test_the_generator_of_a_sampler_inside_another_is_saved(strategy):
    def distributed(seed):
        generator = torch.Generator().manual_seed(seed)
        sampler = BatchSampler(RandomSampler(DATASET, generator=generator), 4, False)
        return strategy.experimental_distribute_dataset(DataLoader(DATASET, batch_sampler=sampler))

    first = distributed(1)
    read(first)
    iterator = iter(first)
    head = read([next(iterator)])
    second = distributed(2)
    second.load_state_dict(iterator.state_dict())
    assert sorted(head + read(second)) == list(range(EXAMPLES))


def test_a_state_goes_through_torch_save(strategy):
    distributed = strategy.experimental_distribute_dataset(SOURCES["loader"]())
    next(iter(distributed))
    state = distributed.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file)  # which refuses what is not plain
    random.seed(3)
    distributed.load_state_dict(loaded)
    assert len(read(distributed)) == EXAMPLES - 4


def test_a_state_of_another_input_is_refused(strategy):
    first = strategy.experimental_distribute_dataset(DataLoader(DATASET, 4))
    next(iter(first))
    state = first.state_dict()
    for other in (DataLoader(DATASET, 2), ms.input.BatchedDataset(np.arange(EXAMPLES), 4)):
        second = strategy.experimental_distribute_dataset(other)
        with pytest.raises(ValueError, match=r"Load it into .* with the same batch size"):
            second.load_state_dict(state)
        assert read(second) == list(range(EXAMPLES))  # it is as it was


def test_a_list_is_no_map_style_dataset():
    with pytest.raises(TypeError, match="of examples, or of arrays"):
        ms.input.BatchedDataset([(1, 2), (3, 4)], 2)


@pytest.mark.mpi(min_size=2)
def test_an_input_function_of_v1_that_fails_on_one_rank():
    from support.rank_errors import errors_of_ranks

    strategy = v1.experimental.MultiWorkerMirroredStrategy()

    def make(context):
        if context.input_pipeline_id == 0:
            raise OSError("no such folder")
        return [np.ones(2)]

    errors = errors_of_ranks(lambda: strategy.make_input_fn_iterator(make))
    assert errors[0][0] == "OSError"
    assert all("no such folder" in text for _, text, _ in errors)


def test_texts_in_lists_cannot_be_left_out():
    """Where a replica has no examples: a list of texts is taken for structure, and would stay."""
    strategy = ms.MirroredStrategy(["cpu:0", "cpu:1"], comm=MPI.COMM_SELF)
    texts = ms.input.FileDataset([range(5)], lambda file: map(str, file), 4, collate_fn=list)
    with pytest.raises(ValueError, match=r"changes its structure|cannot be made a batch of no"):
        list(strategy.experimental_distribute_dataset(texts))
    arrays = ms.input.FileDataset([range(5)], lambda file: map(str, file), 4)
    steps = [
        strategy.experimental_local_results(step)
        for step in strategy.experimental_distribute_dataset(arrays)
    ]
    assert [part.tolist() for part in steps[-1]] == [["4"], []]


@pytest.mark.mpi(min_size=2)
def test_ranks_that_name_other_files_or_orders(strategy):
    """An unsorted list of a folder is another on each node."""
    from support.rank_errors import errors_of_ranks

    rank = WORLD.rank
    names = [f"/node{rank}/{i}" for i in range(2 * WORLD.size)]
    good = ms.input.FileDataset(names, lambda file: [0], 4)
    strategy.experimental_distribute_dataset(good)  # each node's own folder is fine
    for different in (
        lambda: ms.input.FileDataset(names[rank:] + names[:rank], lambda file: [0], 4),
        lambda: ms.input.BatchedDataset(np.arange(8), 4, shuffle=True, seed=rank),
        lambda: ms.input.BatchedDataset(np.arange(8 + rank), 4),
    ):
        errors = errors_of_ranks(
            lambda make=different: strategy.experimental_distribute_dataset(make())
        )
        assert {name for name, _, _ in errors} == {"CollectiveMismatchError"}


@pytest.mark.parametrize("workers", [0, 1])
def test_two_iterators_at_once(strategy, workers):
    loader = DataLoader(DATASET, 4, num_workers=workers)
    distributed = strategy.experimental_distribute_dataset(loader)
    first, second = [], []
    for batch, two in zip(distributed, distributed, strict=True):
        first.append(batch)
        second.append(two)
    assert read(first) == read(second) == list(range(EXAMPLES))


class Named(torch.utils.data.Dataset):
    """Its indices are names, of which 0 is none."""

    def __getitem__(self, name):
        return {"a": 1, "b": 2, "c": 3}[name]


def test_a_replica_without_examples_loads_one_that_there_is(strategy):
    loader = DataLoader(Named(), batch_sampler=[["a"], ["b", "c"]])
    assert read(strategy.experimental_distribute_dataset(loader)) == [1, 2, 3]


@pytest.mark.parametrize("source", ["loader", "files"])
def test_a_state_at_the_end_of_an_epoch_goes_on_with_the_next(strategy, source):
    distributed = strategy.experimental_distribute_dataset(SOURCES[source]())
    read(distributed)
    state = distributed.state_dict()
    assert (state["epoch"], state["steps"]) == (1, 0)
    again = strategy.experimental_distribute_dataset(SOURCES[source]())
    again.load_state_dict(state)
    assert read(again) == list(range(EXAMPLES))


def plain(batches):
    return [batch[0].tolist() for batch in batches]


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(DATASET, 5),
        lambda: DataLoader(DATASET, 5, shuffle=True),
        lambda: DataLoader(DATASET, 5, shuffle=True, drop_last=True),
        lambda: DataLoader(DATASET, 5, shuffle=True, generator=torch.Generator().manual_seed(3)),
        lambda: DataLoader(DATASET, 5, sampler=RandomSampler(DATASET, replacement=True)),
        lambda: DataLoader(DATASET, 5, sampler=RandomSampler(DATASET, num_samples=7)),
        lambda: DataLoader(DATASET, 5, shuffle=True, num_workers=1),
        lambda: DataLoader(DATASET, 5, shuffle=True, pin_memory=True),
    ],
    ids=[
        *("in order", "shuffled", "drop_last", "generator", "replacement", "samples"),
        *("worker", "pinned"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning")  # there may be no GPU
def test_one_replica_reads_what_the_loader_gives(make):
    """The same batches in the same order as without a strategy, in each epoch; random numbers go on alike."""
    alone = ms.MultiWorkerMirroredStrategy(comm=MPI.COMM_SELF)
    loader = make()
    torch.manual_seed(4)
    expected = [plain(loader) for _ in range(3)], torch.rand(1)
    distributed = alone.experimental_distribute_dataset(make())
    torch.manual_seed(4)
    read = [plain(distributed) for _ in range(3)], torch.rand(1)
    assert read == expected


class Curriculum(torch.utils.data.Sampler):
    """Its batches follow the number of steps that the program has made."""

    done = 0

    def __iter__(self):
        for _ in range(3):
            yield [4 * self.done + i for i in range(4)]

    def __len__(self):
        return 3


class Drawing(torch.utils.data.Sampler):
    """It draws each example when it is asked for it, from three global generators."""

    def __iter__(self):
        for _ in range(12):
            yield int(torch.randint(4, ())) + random.randrange(4) + int(np.random.randint(4))

    def __len__(self):
        return 12


def in_turn_with(sampler, batches, whole=lambda batch: batch):
    """The batches of a loop that draws from the generators, and moves the sampler on, in each step."""
    torch.manual_seed(4)
    random.seed(4)
    np.random.seed(4)
    read = []
    for _ in range(2):
        sampler.done = 0
        for (batch,) in batches:
            read.append(whole(batch).tolist())
            read.append([float(torch.rand(())), random.random(), np.random.rand()])
            sampler.done += 1
    return read


def curriculum():
    sampler = Curriculum()
    return sampler, DataLoader(DATASET, batch_sampler=sampler)


def drawing():
    sampler = Drawing()
    return sampler, DataLoader(DATASET, 5, sampler=sampler)


@pytest.mark.parametrize("make", [curriculum, drawing])
def test_a_sampler_of_the_program_is_asked_when_torch_asks_it(make):
    """Then one rank reads the same values as without a strategy."""
    alone = ms.MultiWorkerMirroredStrategy(comm=MPI.COMM_SELF)
    expected = in_turn_with(*make())
    sampler, loader = make()
    assert in_turn_with(sampler, alone.prepare(loader)) == expected


def test_all_ranks_read_a_curriculum_step_by_step(strategy):
    sampler, loader = curriculum()
    options = ms.InputOptions(experimental_per_replica_buffer_size=2)
    batches = strategy.experimental_distribute_dataset(loader)
    ahead = strategy.experimental_distribute_dataset(loader, options)
    whole = lambda batch: strategy.gather(batch, axis=0)  # noqa: E731
    for distributed, steps in ((batches, [0, 1, 2]), (ahead, [0, 0, 2])):
        read = in_turn_with(sampler, distributed, whole)[:6:2]
        assert read == [[4 * step + i for i in range(4)] for step in steps]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning")
def test_pinned_batches(strategy, workers):
    """The loader pins what each rank reads, where there is a GPU to pin it for."""
    loader = DataLoader(DATASET, 5, pin_memory=True, num_workers=workers)
    steps = list(strategy.experimental_distribute_dataset(loader))
    assert read(steps) == list(range(EXAMPLES))
    if torch.cuda.is_available():
        assert all(step[0].is_pinned() or step[0].is_cuda for step in steps)


class Twice(DataLoader):
    """Gives each batch two times."""

    def __iter__(self):
        for batch in super().__iter__():
            yield from (batch, batch)


@pytest.mark.filterwarnings("ignore:each of the:UserWarning")
def test_a_loader_that_iterates_in_its_own_way(strategy):
    loader = Twice(DATASET, 4)
    assert read(strategy.experimental_distribute_dataset(loader)) == sorted(
        [*range(24), *range(24)]
    )


@pytest.mark.parametrize("persistent", [False, True])
def test_persistent_workers_are_the_same_processes(strategy, persistent):
    pids_of_readers = ProcessIds(4 * WORLD.size)
    loader = DataLoader(
        pids_of_readers, 2 * WORLD.size, num_workers=1, persistent_workers=persistent
    )
    distributed = strategy.experimental_distribute_dataset(loader)
    pids = [{int(pid) for step in distributed for pid in step} for _ in range(2)]
    assert (pids[0] == pids[1]) is persistent
    assert os.getpid() not in pids[0]


class Lengthy:
    def __init__(self, batches, length):
        self.batches, self.length = batches, length

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(self.batches)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("length", "words"), [(2, "gave more"), (4, "ended after 3")])
def test_a_length_that_is_wrong(strategy, length, words):
    from support.rank_errors import errors_of_ranks

    def program():
        for step in strategy.distribute_datasets_from_function(
            lambda context: Lengthy([np.ones(2)] * 3, length)
        ):
            strategy.reduce("sum", step, axis=None)

    errors = errors_of_ranks(program)
    assert all(words in text for _, text, _ in errors)


class Stream(torch.utils.data.IterableDataset):
    """Its length is a guess, as lengths of streams are."""

    def __len__(self):
        return 4

    def __iter__(self):
        return iter(torch.arange(EXAMPLES))


@pytest.mark.filterwarnings("ignore:Length of IterableDataset:UserWarning")
def test_the_guessed_length_of_a_stream_cuts_nothing(strategy):
    distributed = strategy.distribute_datasets_from_function(
        lambda context: DataLoader(Stream(), 4)
    )
    assert read(distributed) == sorted(list(range(EXAMPLES)) * WORLD.size)


class Threads:
    """Gives the thread that asks."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return threading.get_ident()


def test_examples_are_read_off_the_training_thread(strategy):
    batches = ms.input.BatchedDataset(Threads(), 4)
    for step in strategy.experimental_distribute_dataset(batches):
        assert threading.get_ident() not in np.asarray(step).tolist()


@pytest.mark.parametrize("devices", [("cpu:0",), ("cpu:0", "cpu:1")])
def test_a_model_that_cannot_take_an_empty_batch(devices):
    """Its error says what to do; errors of other kinds, or of one replica, do not."""
    strategy = ms.MultiWorkerMirroredStrategy(devices=devices)

    def advice(fn, value):
        with pytest.raises(IndexError) as raised:
            strategy.run(fn, args=(ms.PerReplica([value] * len(devices)),))
        return str(raised.value) + "".join(getattr(raised.value, "__notes__", ()))

    several = WORLD.size * len(devices) > 1
    assert ("drop_last=True" in advice(lambda x: x[0], np.ones((0, 3)))) is several
    assert "drop_last" not in advice(lambda x: x[5], np.ones((2, 3)))


@pytest.mark.parametrize("source", ["loader", "files", "generator"])
@pytest.mark.filterwarnings("ignore:each of the:UserWarning")
def test_the_spec_of_an_iterator_reads_nothing_away(strategy, source):
    iterator = iter(strategy.experimental_distribute_dataset(SOURCES[source]()))
    assert iterator.element_spec is not None
    assert read(iterator) == list(range(EXAMPLES))


@pytest.mark.parametrize("source", ["loader", "files"])
@pytest.mark.parametrize("which", ["dataset", "iterator"])
def test_the_spec_between_two_restarts(strategy, source, which):
    """Loaded, asked for its spec, and saved again before a step was taken."""
    torch.manual_seed(1)
    first = iter(strategy.experimental_distribute_dataset(SOURCES[source]()))
    head = read([next(first), next(first)])
    torch.manual_seed(2)
    second = strategy.experimental_distribute_dataset(SOURCES[source]())
    it = iter(second) if which == "iterator" else second
    it.load_state_dict(first.state_dict())
    assert it.element_spec is not None
    state = it.state_dict()
    assert sorted(head + read(it)) == list(range(EXAMPLES))
    torch.manual_seed(3)
    third = strategy.experimental_distribute_dataset(SOURCES[source]())
    third.load_state_dict(state)
    assert sorted(head + read(third)) == list(range(EXAMPLES))


class Strict(torch.utils.data.Dataset):
    """Of integers, as torch's own samplers give them."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        assert type(index) is int
        return index


@pytest.mark.parametrize("policy", ["AUTO", "OFF", "FILE"])
def test_indices_are_integers(policy):
    alone = ms.MirroredStrategy(["cpu:0", "cpu:1"], comm=MPI.COMM_SELF)
    options = ms.InputOptions(experimental_auto_shard_policy=policy)
    for _ in alone.experimental_distribute_dataset(DataLoader(Strict(), 4, shuffle=True), options):
        pass


def test_each_rank_goes_on_in_an_order_of_its_own():
    """Under OFF each rank shuffles for itself, so the saved state has the order of each rank."""
    options = ms.InputOptions(experimental_auto_shard_policy="OFF")
    strategy = ms.MultiWorkerMirroredStrategy()

    def begun():
        generator = torch.Generator().manual_seed(WORLD.rank)
        loader = DataLoader(
            TensorDataset(torch.arange(6 * WORLD.size)), WORLD.size, True, generator=generator
        )
        return iter(strategy.experimental_distribute_dataset(loader, options))

    iterator, restored = begun(), begun()
    [next(iterator) for _ in range(2)]
    restored.load_state_dict(iterator.state_dict())
    assert plain(restored) == plain(iterator)


@pytest.mark.parametrize("examples", [10, 12])
def test_a_program_that_counts_its_steps_gets_torchs_orders(examples):
    """A sampler is exhausted with the last short batch, before a further one is asked for."""

    def epochs(make):
        data = TensorDataset(torch.arange(examples))
        generator = torch.Generator().manual_seed(1)
        batches = make(DataLoader(data, 4, shuffle=True, generator=generator))
        return [plain(step for _, step in zip(range(3), batches, strict=False)) for _ in range(3)]

    alone = ms.MultiWorkerMirroredStrategy(comm=MPI.COMM_SELF)
    assert epochs(alone.experimental_distribute_dataset) == epochs(lambda loader: loader)


class RecordedDataset(torch.utils.data.Dataset):
    def __init__(self):
        self.loaded = []

    def __len__(self):
        return 4 * WORLD.size + 1

    def __getitem__(self, index):
        self.loaded.append(index)
        return index


def test_a_replica_without_examples_reads_none(strategy):
    """Where it knows from earlier batches what one looks like."""
    data = RecordedDataset()
    read(strategy.experimental_distribute_dataset(DataLoader(data, 4 * WORLD.size)))
    assert len(data.loaded) == 4 + (WORLD.rank == 0)


@pytest.mark.mpi(min_size=2)
def test_only_some_ranks_have_devices(monkeypatch):
    """All read ahead, for reading asks the other ranks."""
    from mpistrat.input import distributed_dataset

    class Copies:
        needed = WORLD.rank == 0
        start = arrived = staticmethod(list)

    monkeypatch.setattr(distributed_dataset, "DeviceCopies", lambda devices: Copies())
    strategy = ms.MultiWorkerMirroredStrategy()
    seen = []
    for step in strategy.distribute_datasets_from_function(
        lambda context: ([i] for i in map(np.float64, range(5)))
    ):
        seen.append(step)
        strategy.reduce("sum", np.ones(2), axis=None)
    assert len(seen) == 5


class BrokenTable(torch.utils.data.Sampler):
    def __iter__(self):
        if WORLD.rank == WORLD.size - 1:
            raise LookupError("no table on this rank")
        return iter(range(EXAMPLES))

    def __len__(self):
        return EXAMPLES


def test_a_sampler_that_fails_on_the_last_rank(strategy):
    from support.rank_errors import errors_of_ranks

    loader = DataLoader(DATASET, 4, sampler=BrokenTable())
    errors = errors_of_ranks(lambda: read(strategy.experimental_distribute_dataset(loader)))
    assert all("no table on this rank" in text for _, text, _ in errors)


def test_an_unpicklable_stream_is_named(strategy):
    class Local(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(4))

    loader = DataLoader(Local(), 4, num_workers=1)
    distributed = strategy.distribute_datasets_from_function(lambda context: loader)
    with pytest.raises(TypeError, match="the DataLoader's dataset cannot be sent"):
        next(iter(distributed))
