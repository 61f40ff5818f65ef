"""Which examples an epoch shows, over all workers: what each policy promises, for any sizes."""

from collections import Counter
from itertools import accumulate, chain, takewhile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.errors import NotFoundError
from mpistrat.input import BatchedDataset, FileDataset
from mpistrat.input.file_reader import FileReader
from mpistrat.input.readers import BatchReader, IndexReader
from mpistrat.input.splitting import EMPTY, MISSING
from mpistrat.options import AutoShardPolicy
from mpistrat.replicas.input_plan import Share

AUTO, DATA = AutoShardPolicy.AUTO, AutoShardPolicy.DATA
FILE, OFF = AutoShardPolicy.FILE, AutoShardPolicy.OFF

batch_sizes = st.integers(1, 20)
switches = st.booleans()


@st.composite
def jobs(draw):
    """The shares of all ranks: 1 to 4 workers with 1 to 8 replicas in all; a worker is one rank or several."""
    workers = draw(st.integers(1, 4))
    ranks = draw(st.integers(1, 2)) if workers == 1 else 1
    k = draw(st.integers(1, 8 // (workers * ranks)))
    consecutive = draw(st.booleans())
    firsts = [worker * ranks * k if consecutive else None for worker in range(workers)]
    return [
        Share(workers, worker, workers * ranks * k, range(rank * k, (rank + 1) * k), firsts[worker])
        for worker in range(workers)
        for rank in range(ranks)
    ]


def workers_of(job):
    return job[0].workers


def epoch_of(readers):
    """For each rank its steps, each a list of the examples of each replica."""
    read = [list(reader.steps(0, 0)) for reader in readers]
    ranks = [[[examples_of(entry) for entry in step] for step in steps] for steps in read]
    check_counts(ranks, read)
    if readers[0].ends_together:
        assert len({len(steps) for steps in ranks}) == 1
        if readers[0].drop_last:  # where a replica without data ends the epoch
            steps = chain.from_iterable(reader.steps(0, 0) for reader in readers)
            assert not any(entry is MISSING for step in steps for entry in step)
    return ranks


def check_counts(ranks, read):
    """Steps that say how many examples they have say what is so: of each replica of the rank, and of all."""
    for i, step in enumerate(zip(*ranks)):  # noqa: B905 - some ranks have more, without saying how many
        total = sum(len(piece) for pieces in step for piece in pieces)
        for pieces, steps in zip(step, read, strict=True):
            if steps[i].examples is not None:
                assert steps[i].examples.tolist() == [*map(len, pieces), total]


def examples_of(entry):
    if entry is MISSING or entry is EMPTY:
        return []
    return np.asarray(entry).tolist()


def seen(steps):
    """The examples of one rank, in its order."""
    return list(chain.from_iterable(chain.from_iterable(steps)))


def seen_by_workers(job, ranks):
    """For each worker the examples of its ranks, how often each."""
    counts = [Counter() for _ in range(workers_of(job))]
    for share, steps in zip(job, ranks, strict=True):
        counts[share.worker].update(seen(steps))
    return counts


def whole_batches(examples, batch_size, drop_last):
    """What is left of `examples` without a last batch that is short."""
    return examples[: len(examples) // batch_size * batch_size] if drop_last else examples


def check(job, policy, ranks, expected):
    """Under OFF each worker sees `expected`; otherwise all together see it, each example once."""
    counts = seen_by_workers(job, ranks)
    if policy is OFF:
        assert counts == [Counter(expected)] * len(counts)
    else:
        assert sum(counts, Counter()) == Counter(expected)


def check_steps(ranks, batches):
    """Each step of all ranks together is one global batch."""
    together = [
        Counter(chain.from_iterable(map(chain.from_iterable, step)))
        for step in zip(*ranks, strict=True)
    ]
    assert together == [Counter(batch) for batch in batches]


@given(
    jobs(), st.integers(0, 60), batch_sizes, st.sampled_from(AutoShardPolicy), switches, switches
)
def test_map_style_datasets(job, examples, batch_size, policy, drop_last, shuffle):
    dataset = BatchedDataset(
        np.arange(examples), batch_size, drop_last=drop_last, shuffle=shuffle, seed=3
    )
    if policy is FILE and workers_of(job) > 1:
        with pytest.raises(NotFoundError, match="FileDataset"):
            IndexReader(dataset, job[0], policy)
        return
    ranks = epoch_of([IndexReader(dataset, share, policy) for share in job])
    batches = list(dataset.index_batches(0))
    order = list(chain.from_iterable(batches))
    assert (
        len(order) == len(set(order)) == len(whole_batches(range(examples), batch_size, drop_last))
    )
    check(job, policy, ranks, order)
    if policy in (AUTO, DATA):
        check_steps(ranks, batches)


class Batches(list):
    """Batches that say how large they are."""

    def __init__(self, batches, batch_size, drop_last):
        super().__init__(batches)
        self.batch_size, self.drop_last = batch_size, drop_last


@given(
    jobs(), st.integers(0, 60), batch_sizes, st.sampled_from(AutoShardPolicy), switches, switches
)
def test_iterables_of_batches(job, examples, batch_size, policy, drop_last, knows_size):
    order = whole_batches(range(examples), batch_size, drop_last)
    batches = [
        np.asarray(order[first : first + batch_size]) for first in range(0, len(order), batch_size)
    ]
    dataset = Batches(batches, batch_size, drop_last) if knows_size else batches
    if policy is FILE and workers_of(job) > 1:
        with pytest.raises(NotFoundError, match="FileDataset"):
            BatchReader(dataset, job[0], policy)
        return
    ranks = epoch_of([BatchReader(dataset, share, policy) for share in job])
    check(job, policy, ranks, order)
    if policy in (AUTO, DATA):
        check_steps(ranks, [batch.tolist() for batch in batches])


@given(
    jobs(),
    st.lists(st.integers(0, 12), min_size=4, max_size=10),
    batch_sizes,
    st.sampled_from(AutoShardPolicy),
    switches,
    switches,
)
def test_files(job, lengths, batch_size, policy, drop_last, shuffle):
    """With drop_last, a worker leaves out what does not fill a step for all its replicas (DATA: a global batch)."""
    firsts = [0, *accumulate(lengths)]
    dataset = FileDataset(
        range(len(lengths)),
        lambda file: iter(range(firsts[file], firsts[file + 1])),
        batch_size,
        drop_last=drop_last,
        shuffle=shuffle,
        seed=3,
    )
    ranks = epoch_of([FileReader(dataset, share, policy) for share in job])
    files = dataset.order(0)
    order = list(chain.from_iterable(map(dataset.reader, files)))
    if policy is DATA:
        order = whole_batches(order, batch_size, drop_last)
        check(job, policy, ranks, order)
        check_steps(ranks, [order[i : i + batch_size] for i in range(0, len(order), batch_size)])
        return
    if not drop_last:
        check(job, policy, ranks, order)
    counts = seen_by_workers(job, ranks)
    for share in job:
        n = share.workers
        mine = files if policy is OFF or n == 1 else files[share.worker :: n]
        read = list(chain.from_iterable(map(dataset.reader, mine)))
        if drop_last:
            read = read[: whole_steps(len(read), batch_size, share)]
        assert counts[share.worker] == Counter(read)


def whole_steps(examples, batch_size, share):
    """How many of `examples` a worker reads in steps that fill the pieces of all its replicas.

    Piece i of a stream has floor(batch / n) examples, or one more; worker w begins with piece w * (n / workers).
    """
    n, k = share.num_replicas, share.num_replicas // share.workers
    floor, larger = divmod(batch_size, n)
    ends = (
        sum(floor + ((share.worker * k + i) % n < larger) for i in range(steps * k))
        for steps in range(1, 10**6)
    )
    return max(chain([0], takewhile(lambda end: end <= examples, ends)))
