"""How a dataset is read: for each epoch, an iterator over the steps of one rank.

A step holds an entry for each replica of the rank: its batch, EMPTY for a piece without examples, or MISSING where the
data ends before the step is full.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from mpistrat.communicators import Communicator
from mpistrat.errors import InvalidArgumentError, NotFoundError
from mpistrat.input.batches import Batches
from mpistrat.input.datasets import BatchedDataset, FileDataset
from mpistrat.input.splitting import (
    Lists,
    Share,
    pieces_of_each,
    pieces_of_examples,
    pieces_of_stream,
    steps_of_stream,
)
from mpistrat.options import AutoShardPolicy

EMPTY, MISSING = object(), None
Step = list[Any]

UNKNOWN_CARDINALITY = -2


class StepAt(Step):
    """A step that knows where it has left its reader: what `state` needs of it."""

    def __init__(self, position: Any, entries: Iterable[Any]) -> None:
        super().__init__(entries)
        self.position = position


class Reader(abc.ABC):
    """Reads one dataset for one rank.

    Attributes:
        ends_together: all ranks make the same number of steps, without asking each other.
        same_for_any_ranks: after as many steps, the same examples have been read, however many ranks there are.
        batch_size: examples of a global batch, or None.
        drop_last: every batch is full.
    """

    ends_together = True
    same_for_any_ranks = True
    batch_size: int | None = None
    drop_last = False

    @abc.abstractmethod
    def steps(self, epoch: int, start: int) -> Iterator[Step]:
        """An epoch from its step number `start` on."""

    def num_steps(self) -> int | None:
        """Of this rank, in an epoch; None when it is not known before."""
        return None

    def cardinality(self) -> int:
        """Global batches of an epoch; -1: they never end, -2: not known before."""
        return UNKNOWN_CARDINALITY

    def template(self) -> Any:
        """A batch like those of this rank, for batches of no examples; None when there is none yet."""
        return None

    def identity(self) -> dict[str, Any]:
        """What must be the same where a state is loaded."""
        return {"source": type(self).__name__, "batch_size": self.batch_size}

    def state(self, communicator: Communicator, position: Any) -> dict[str, Any]:
        """What to save, after the step that left `position`, beside the numbers of epoch and step. Collective."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """What `state` gave, possibly on another number of ranks; the next epoch goes on from there."""
        return


def splits_each_batch(share: Share, policy: AutoShardPolicy, batch_size: int | None) -> bool:
    """Which rule of `splitting` cuts the batches of a dataset that is not made of files."""
    if policy is AutoShardPolicy.FILE and share.workers > 1:
        raise NotFoundError(
            "AutoShardPolicy.FILE needs a mpistrat.input.FileDataset, whose files can be shared out; this dataset is "
            "none. Use AUTO or DATA"
        )
    to_be_shared = policy in (AutoShardPolicy.AUTO, AutoShardPolicy.DATA)
    return to_be_shared or batch_size is None or share.num_replicas == 1


def reads_all(share: Share, policy: AutoShardPolicy) -> bool:
    """Whether each worker goes through the whole dataset for itself, and none takes part of what another read."""
    return policy is AutoShardPolicy.OFF and share.workers > 1


def steps_of_indices(
    index_batches: Iterable[list[int]],
    share: Share,
    policy: AutoShardPolicy,
    batch_size: int | None,
) -> Iterator[list[list[int] | None]]:
    """The indices that each replica of this rank loads; None where there are no more."""
    if splits_each_batch(share, policy, batch_size):
        if not reads_all(share, policy):
            return pieces_of_each(index_batches, Lists(), share.pieces, share.num_replicas)
        everybody = range(share.num_replicas)
        pieces = pieces_of_each(index_batches, Lists(), everybody, share.num_replicas)
        return steps_of_stream(itertools.chain.from_iterable(pieces), share)
    assert batch_size is not None
    examples = itertools.chain.from_iterable(index_batches)
    return steps_of_stream(pieces_of_examples(examples, share.sizes(batch_size)), share)


class IndexReader(Reader):
    """Of a BatchedDataset: each rank loads the examples of its own replicas."""

    def __init__(self, dataset: BatchedDataset, share: Share, policy: AutoShardPolicy) -> None:
        self._dataset, self._share, self._policy = dataset, share, policy
        self.batch_size, self.drop_last = dataset.batch_size, dataset.drop_last
        self.same_for_any_ranks = self.ends_together = not reads_all(share, policy)
        splits_each_batch(share, policy, self.batch_size)

    def _indices(self, epoch: int) -> Iterator[list[list[int] | None]]:
        batches = self._dataset.index_batches(epoch)
        return steps_of_indices(batches, self._share, self._policy, self.batch_size)

    def steps(self, epoch: int, start: int) -> Iterator[Step]:
        steps = self._indices(epoch) if len(self._dataset) else iter(())
        for step in itertools.islice(steps, start, None):
            yield [
                MISSING if piece is None else self._dataset.load(piece) if piece else EMPTY
                for piece in step
            ]

    def cardinality(self) -> int:
        return len(self._dataset)

    def template(self) -> Any:
        return self._dataset.load([0])


class BatchReader(Reader):
    """Of an iterable of global batches, which every rank reads whole.

    It may say more of itself: `batch_size`, `drop_last`, a length, or `cardinality` (-1 for one that never ends).
    """

    def __init__(self, batches: Iterable[Any], share: Share, policy: AutoShardPolicy) -> None:
        self._batches, self._share, self._policy = batches, share, policy
        size = getattr(batches, "batch_size", None)
        self.batch_size = size if isinstance(size, int) else None
        self.drop_last = bool(getattr(batches, "drop_last", False))
        self._splits_each = splits_each_batch(share, policy, self.batch_size)
        self.same_for_any_ranks = self.ends_together = not reads_all(share, policy)

    def steps(self, epoch: int, start: int) -> Iterator[Step]:
        kind, share = Batches(), self._share
        if self._splits_each and not reads_all(share, self._policy):
            batches = itertools.islice(self._batches, start, None)
            return pieces_of_each(batches, kind, share.pieces, share.num_replicas)
        if self._splits_each:
            everybody = range(share.num_replicas)
            all_pieces = pieces_of_each(self._batches, kind, everybody, share.num_replicas)
            pieces: Iterator[Any] = itertools.chain.from_iterable(all_pieces)
        else:
            assert self.batch_size is not None
            pieces = pieces_of_stream(self._batches, kind, share.sizes(self.batch_size))
        return itertools.islice(steps_of_stream(pieces, share), start, None)

    def cardinality(self) -> int:
        told = getattr(self._batches, "cardinality", None)
        if isinstance(told, int):
            return told
        try:
            return len(self._batches)  # type: ignore[arg-type]
        except TypeError:
            return UNKNOWN_CARDINALITY


@dataclass(frozen=True)
class _Restart:
    """What had been read of an epoch's files before a restart.

    Attributes:
        finished: files that were read whole.
        partly: how many examples of others.
        left: which files each worker had still to read.
    """

    finished: frozenset[int] = frozenset()
    partly: dict[int, int] = field(default_factory=dict)
    left: dict[int, list[int]] = field(default_factory=dict)


@dataclass
class _Place:
    """Where a worker is in its files of an epoch: `finished` of them are read, and `count` examples of the next."""

    restart: _Restart
    files: list[int]
    finished: int = 0
    count: int = 0

    @property
    def done(self) -> list[int]:
        return self.files[: self.finished]

    @property
    def partly(self) -> dict[int, int]:
        return {self.files[self.finished]: self.count} if self.count else {}

    @property
    def left(self) -> list[int]:
        return self.files[self.finished :]


class FileReader(Reader):
    """Of a FileDataset. Under FILE, worker w reads the files w, w + workers, … of the epoch's order."""

    def __init__(self, dataset: FileDataset, share: Share, policy: AutoShardPolicy) -> None:
        self._dataset, self._share = dataset, share
        self.batch_size, self.drop_last = dataset.batch_size, dataset.drop_last
        self._splits_each = policy is AutoShardPolicy.DATA
        self._by_file = policy in (AutoShardPolicy.AUTO, AutoShardPolicy.FILE)
        self.ends_together = self._splits_each or share.workers == 1
        self.same_for_any_ranks = policy is not AutoShardPolicy.OFF or share.workers == 1
        if self._by_file and len(dataset.files) < share.workers:
            raise InvalidArgumentError(
                f"AutoShardPolicy.{policy.name} gives each of the {share.workers} workers files of its own, but there "
                f"are {len(dataset.files)}: split them further, use fewer ranks, or set "
                "InputOptions(experimental_auto_shard_policy=AutoShardPolicy.DATA), with which every rank reads all"
            )
        self._first_example: Any = None
        self._restart = _Restart()

    def steps(self, epoch: int, start: int) -> Iterator[Step]:
        share, dataset = self._share, self._dataset
        if start == 0:
            self._restart = _Restart()
        restart = self._restart
        order = [number for number in dataset.order(epoch) if number not in restart.finished]
        mine = order[share.worker :: share.workers] if self._by_file else order
        if len(restart.left) == share.workers:  # as many as before: each goes on with its own
            mine = restart.left[share.worker]
        place = _Place(restart, mine)
        examples = self._examples(place)
        if self._splits_each:
            batches = pieces_of_examples(
                examples, [dataset.batch_size], drop_last=dataset.drop_last
            )
            pieces = pieces_of_each(batches, Lists(), share.pieces, share.num_replicas)
            steps: Iterator[Step] = iter(pieces)
        else:
            sizes = share.sizes(dataset.batch_size)
            begun = start * share.replicas_per_worker % len(sizes) if self._by_file else 0
            sizes = sizes[begun:] + sizes[:begun]
            kept = pieces_of_examples(examples, sizes, drop_last=dataset.drop_last)
            steps = steps_of_stream(kept, share, drop_last=dataset.drop_last)
        if not self._by_file:
            steps = itertools.islice(steps, start, None)
        for step in steps:
            here = replace(place)
            yield StepAt(
                here,
                (
                    MISSING if piece is None else dataset.collate(piece) if piece else EMPTY
                    for piece in step
                ),
            )

    def _examples(self, place: _Place) -> Iterator[Any]:
        for i, number in enumerate(place.files):
            examples = iter(self._dataset.reader(self._dataset.files[number]))
            skipped = place.restart.partly.get(number, 0)
            for count, example in enumerate(itertools.islice(examples, skipped, None), skipped + 1):
                if self._first_example is None:
                    self._first_example = example
                place.finished, place.count = i, count
                yield example
            place.finished, place.count = i + 1, 0

    def state(self, communicator: Communicator, position: Any) -> dict[str, Any]:
        """By file, so that other ranks can go on, each with other files."""
        if not self._by_file:
            return {}
        told = None if position is None else (position.done, position.partly, position.left)
        everyone = communicator.all_gather_object((self._share.worker, told), label="files read")
        restart = self._restart if position is None else position.restart
        finished, partly, left = set(restart.finished), dict(restart.partly), {}
        for worker, (done, part, rest) in ((w, one) for w, one in everyone if one is not None):
            finished.update(done)
            partly.update(part)
            left[worker] = rest
        if not left:  # no step since the restart, if there was one
            left = dict(restart.left)
        else:  # workers that had no step have nothing left
            left = {worker: left.get(worker, []) for worker in range(self._share.workers)}
        partly = {number: count for number, count in partly.items() if number not in finished}
        return {"finished": sorted(finished), "partly": partly, "left": left}

    def load_state(self, state: dict[str, Any]) -> None:
        if self._by_file:
            finished, partly, left = state["finished"], state["partly"], state["left"]
            self._restart = _Restart(frozenset(finished), dict(partly), dict(left))

    def template(self) -> Any:
        return None if self._first_example is None else self._dataset.collate([self._first_example])


class FunctionReader(Reader):
    """Of what a dataset function made: batches per replica, already sharded.

    Args:
        datasets: one for all replicas of this rank, which take turns, or one for each.
    """

    ends_together = False
    same_for_any_ranks = False

    def __init__(self, datasets: list[Iterable[Any]], num_replicas: int) -> None:
        self._datasets, self._num_replicas = datasets, num_replicas
        self.drop_last = all(getattr(one, "drop_last", False) is True for one in datasets)
        size = getattr(datasets[0], "batch_size", None)
        self.batch_size = size if isinstance(size, int) else None

    def steps(self, epoch: int, start: int) -> Iterator[Step]:
        if len(self._datasets) == self._num_replicas > 1:
            steps = itertools.zip_longest(*self._datasets, fillvalue=MISSING)
            return itertools.islice(map(list, steps), start, None)
        return itertools.islice(self._turns(), start, None)

    def _turns(self) -> Iterator[Step]:
        elements = iter(self._datasets[0])
        while step := list(itertools.islice(elements, self._num_replicas)):
            yield step + [MISSING] * (self._num_replicas - len(step))

    def num_steps(self) -> int | None:
        try:
            lengths = [len(one) for one in self._datasets]  # type: ignore[arg-type]
        except TypeError:
            return None
        return max(-(-length * len(self._datasets) // self._num_replicas) for length in lengths)
