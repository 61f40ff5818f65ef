"""How a dataset is read: for each epoch, an iterator over the steps of one rank."""

from __future__ import annotations

import abc
import collections
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mpistrat import arrays, nest
from mpistrat.communicators import Communicator
from mpistrat.errors import NotFoundError
from mpistrat.input import splitting
from mpistrat.input.batches import Batches
from mpistrat.input.datasets import BatchedDataset
from mpistrat.input.dropped_examples import DroppedExamples, batch_of_one
from mpistrat.input.splitting import MISSING, Kind, Lists, ReplicaPieces
from mpistrat.machine.notices import ranks_in_words
from mpistrat.options import AutoShardPolicy
from mpistrat.replicas.input_plan import Share

if TYPE_CHECKING:
    from mpistrat.input.random_state import RandomState

# Policies that share out each global batch by itself: then all ranks know how many examples each replica has of it.
SHARED = (AutoShardPolicy.AUTO, AutoShardPolicy.DATA)

UNKNOWN_CARDINALITY = -2
_STEPS_KNOWN = 4
_STATE = "state of the order of a dataset"


def knowing_what_follows(steps: Iterator[ReplicaPieces]) -> Iterator[ReplicaPieces]:
    """`steps`, each with what is known of those after it: ranks that know it need not ask each other at each."""
    read: collections.deque[ReplicaPieces] = collections.deque()
    known = 0  # the first step need not wait for others
    try:
        for step in steps:
            for earlier in read:
                earlier.following += 1
            read.append(step)
            if len(read) > known:
                yield read.popleft()
                known = min(known + 1, _STEPS_KNOWN)
    except Exception:
        for earlier in read:
            earlier.fails = True
        yield from read
        raise
    yield from read


class Reader(abc.ABC):
    """Reads one dataset for one rank.

    Attributes:
        ends_together: all ranks make the same number of steps, without asking each other.
        steps_agreed: `num_steps` is the same on all ranks, and each makes as many.
        same_for_any_ranks: after as many steps, the same examples have been read, however many ranks there are.
        batch_size: examples of a global batch, or None. A `FunctionReader` has those of a replica's batch.
        drop_last: every batch is full.
        reads_ahead: on a thread of its own.
        dropped: of a dataset with a `collate_fn` of the program's; all ranks have it, or none.
        compares_ends: all ranks read the same data, and each finds the end for itself.
    """

    reads_ahead = False
    dropped: DroppedExamples | None = None
    compares_ends = False
    ends_together = True
    steps_agreed = False
    same_for_any_ranks = True
    batch_size: int | None = None
    drop_last = False

    @abc.abstractmethod
    def steps(self, epoch: int, start: int) -> Iterator[ReplicaPieces]:
        """An epoch from its step number `start` on."""

    def num_steps(self) -> int | None:
        """Of this rank, in an epoch; None when it is not known before."""
        return None

    def cardinality(self) -> int:
        """Global batches of an epoch; -1: they never end, -2: not known before."""
        return UNKNOWN_CARDINALITY

    def end(self, communicator: Communicator, has_more: bool) -> None:  # noqa: B027
        """The ranks have found out that one of them has no more steps; `has_more`: not this one. Collective."""

    def template(self) -> Any:
        """A batch like those of this rank, for batches of no examples; None when there is none yet."""
        return None

    def identity(self) -> dict[str, Any]:
        """What must be the same where a state is loaded."""
        return {"source": type(self).__name__, "batch_size": self.batch_size}

    def position(self) -> Any:
        """Where the next epoch begins, or goes on after a state was loaded."""
        return None

    def state(self, communicator: Communicator, position: Any) -> dict[str, Any]:
        """What to save, after the step that left `position`, beside the numbers of epoch and step. Collective."""
        return {}

    def load_state(self, communicator: Communicator, state: dict[str, Any]) -> None:
        """What `state` gave, possibly on another number of ranks; the next epoch goes on from there."""
        return

    def state_schema(self) -> dict[str, Any]:
        """What `state` gives looks so: see `checkpoint.schema`."""
        return {}


class Restartable(abc.ABC, Iterable[Any]):
    """Batches in an order of random numbers, which can be had again. Attributes: random: the generators of these."""

    random: RandomState


class _NoRandomState:
    """As a `RandomState`, for batches whose order nobody can have again."""

    began = None
    schema = (None, dict)

    def now(self) -> None:
        return None

    def begin_at(self, state: Any) -> None:
        return None


def _random_of(batches: Any) -> RandomState | _NoRandomState:
    return batches.random if isinstance(batches, Restartable) else _NoRandomState()


def _at(steps: Iterator[ReplicaPieces], position: Callable[[], Any]) -> Iterator[ReplicaPieces]:
    """`steps` with the position that is known when the first was read: samplers draw their seed then."""
    first = list(itertools.islice(steps, 1))
    at = position()
    for step in itertools.chain(first, steps):
        step.position = at
        yield step


def set_epoch(batches: Any, epoch: int) -> None:
    """Say which epoch is read, if `batches` wants to know, as torch's DistributedSampler does."""
    if hasattr(batches, "set_epoch"):
        batches.set_epoch(epoch)


class GlobalReader(Reader):
    """Of a dataset of global batches, which is not made of files.

    With AutoShardPolicy.OFF, each worker goes through the whole dataset for itself.

    Raises: NotFoundError: under a policy that shares out files.
    """

    _random: RandomState | _NoRandomState = _NoRandomState()

    def __init__(self, share: Share, policy: AutoShardPolicy) -> None:
        if policy is AutoShardPolicy.FILE and share.workers > 1:
            raise NotFoundError(
                "AutoShardPolicy.FILE needs a mpistrat.input.FileDataset, whose files can be shared out; this dataset "
                "is none. Use AUTO or DATA"
            )
        self._share, self._policy = share, policy
        self._reads_all = policy is AutoShardPolicy.OFF and share.workers > 1
        self.same_for_any_ranks = self.ends_together = not self._reads_all

    def position(self) -> Any:
        return self._random.now()

    def _steps_of(self, batches: Iterable[Any], kind: Kind, start: int) -> Iterator[ReplicaPieces]:
        """Cut global `batches` by a rule of `splitting`: the pieces of this rank's replicas, from step `start` on.

        A piece is None where there are no more.
        """
        share, n = self._share, self._share.num_replicas
        if self._policy in SHARED or self.batch_size is None or n == 1:
            if not self._reads_all:
                batches = itertools.islice(batches, start, None)
                return splitting.pieces_of_each(batches, kind, share.pieces, n)
            all_pieces = splitting.pieces_of_each(batches, kind, range(n), n)
            pieces: Iterator[Any] = itertools.chain.from_iterable(all_pieces)
        else:
            pieces = splitting.pieces_of_stream(batches, kind, share.sizes(self.batch_size))
        return itertools.islice(splitting.steps_of_stream(pieces, share), start, None)


class IndexReader(GlobalReader):
    """Of a BatchedDataset: each rank loads the examples of its own replicas."""

    def __init__(self, dataset: BatchedDataset, share: Share, policy: AutoShardPolicy) -> None:
        super().__init__(share, policy)
        self._dataset = dataset
        self.batch_size, self.drop_last = dataset.batch_size, dataset.drop_last
        self.reads_ahead = not dataset.of_arrays
        if dataset.program_collate and policy in SHARED:
            self.dropped = DroppedExamples(dataset.program_collate)
        self._collate = self.dropped or dataset.collate

    def steps(self, epoch: int, start: int) -> Iterator[ReplicaPieces]:
        batches = self._dataset.index_batches(epoch)
        for step in self._steps_of(batches, Lists(), start):
            yield step.replace_pieces(self._loaded)

    def _loaded(self, indices: list[int]) -> Any:
        return self._collate(self._dataset.fetch(indices))

    def cardinality(self) -> int:
        return len(self._dataset)

    def template(self) -> Any:
        return batch_of_one(
            self._dataset.collate, self._dataset.fetch, range(self._dataset.examples)
        )


class BatchReader(GlobalReader):
    """Of an iterable of global batches, which every rank reads whole.

    It may say more of itself: `batch_size`, `drop_last`, a length, or `cardinality` (-1 for one that never ends).

    Args:
        compared_over: the ranks that compare the first batch of each epoch, and their lengths, if any do: a shuffle of
            each rank's own shows there. Later batches are not compared; it would cost reading them once more.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        share: Share,
        policy: AutoShardPolicy,
        compared_over: Communicator | None = None,
    ) -> None:
        super().__init__(share, policy)
        self._batches, self._compared_over = batches, compared_over
        self._random = _random_of(batches)
        self.batch_size = number_of(batches, "batch_size")
        self.drop_last = bool(getattr(batches, "drop_last", False))
        self.compares_ends = compared_over is not None

    def steps(self, epoch: int, start: int) -> Iterator[ReplicaPieces]:
        set_epoch(self._batches, epoch)
        batches = iter(self._batches)
        if self._compared_over is not None:
            batches = _alike(batches, self.cardinality(), self._compared_over)
        steps = self._steps_of(batches, Batches(), start)
        yield from _at(steps, lambda: self._random.began)

    def state(self, communicator: Communicator, position: Any) -> dict[str, Any]:
        send = communicator.all_gather_object
        if self.same_for_any_ranks:
            send = communicator.broadcast_object
        return {"random": send(position, label=_STATE)}

    def load_state(self, communicator: Communicator, state: dict[str, Any]) -> None:
        random = state["random"]
        self._random.begin_at(random if self.same_for_any_ranks else random[communicator.rank])

    def state_schema(self) -> dict[str, Any]:
        schema = self._random.schema
        return {"random": schema if self.same_for_any_ranks else [schema]}

    def cardinality(self) -> int:
        cardinality = number_of(self._batches, "cardinality")
        return length_of(self._batches) if cardinality is None else cardinality


def number_of(batches: Any, name: str) -> int | None:
    """An attribute of `batches` that is a number, if there is one."""
    value = getattr(batches, name, None)
    return value if isinstance(value, int) else None


def length_of(dataset: Any) -> int:
    """`len(dataset)`; -2 where it is not known. Classes say so by exceptions of their own."""
    try:
        return len(dataset)
    except Exception:
        return UNKNOWN_CARDINALITY


def _alike(batches: Iterator[Any], length: int, communicator: Communicator) -> Iterator[Any]:
    """`batches`. Raises: ValueError when the ranks' first ones differ, or how many they have."""
    first = list(itertools.islice(batches, 1))
    digest = 0
    for leaf in nest.flatten(first):
        if arrays.is_array(leaf):
            digest = zlib.crc32(arrays.to_numpy(leaf).tobytes(), digest)
    by_rank = communicator.all_gather_object((digest, length), label="first batch of the dataset")
    digests, lengths = zip(*by_rank, strict=True)
    check_alike("batches", lengths)
    if len(set(digests)) > 1:
        raise ValueError(
            "the ranks read different first batches, so some examples would be read twice and others never: an "
            "iterable must yield the same GLOBAL batches on every rank. Give its shuffle the same seed everywhere, or "
            "pass a torch DataLoader itself (progress bars go around the distributed dataset); checksums by rank: "
            f"{digests[:16]}"
        )
    return itertools.chain(first, batches)


def check_alike(unit: str, lengths: Sequence[Any]) -> None:
    """Args: lengths: of the dataset by rank, -2 where it is not known. Raises: ValueError when they are different."""
    if len({*lengths} - {UNKNOWN_CARDINALITY}) > 1:
        runs = itertools.groupby(range(len(lengths)), lengths.__getitem__)
        by_rank = [f"{ranks_in_words(ranks)}: {length} {unit}" for length, ranks in runs]
        raise ValueError(
            f"the ranks read datasets of different lengths ({'; '.join(by_rank[:16])}), so some examples would never "
            "be read. Give every rank the same dataset: the same files, filtered alike; or, if each rank is to have "
            "data of its own, strategy.prepare(loader, local_batches=True)"
        )


def check_all_have_some(steps: Sequence[int]) -> None:
    """Args: steps: that each rank has, at least. Raises: ValueError when some ranks have none, and others have some."""
    without = [rank for rank, count in enumerate(steps) if not count]
    if 0 < len(without) < len(steps):
        raise ValueError(
            f"{ranks_in_words(without)} of {len(steps)} {'has' if len(without) == 1 else 'have'} no data for a step, "
            "and an epoch ends with the shortest rank: nothing would be trained. Give each rank data: cut it into "
            f"{len(steps)} shards or more, use smaller batches, or start fewer ranks ({len(steps) - len(without)})"
        )


class FunctionReader(Reader):
    """Of what a dataset function made: batches per replica, already sharded.

    Args:
        datasets: one for all replicas of this rank, which take turns, or one for each.
    """

    ends_together = False
    same_for_any_ranks = False

    def __init__(self, datasets: list[Iterable[Any]], num_replicas: int) -> None:
        self._datasets, self._num_replicas = datasets, num_replicas
        self._random = [_random_of(dataset) for dataset in datasets]
        self.drop_last = all(getattr(d, "drop_last", False) is True for d in datasets)
        self.batch_size = number_of(datasets[0], "batch_size")

    def steps(self, epoch: int, start: int) -> Iterator[ReplicaPieces]:
        for dataset in self._datasets:
            set_epoch(dataset, epoch)
        steps = itertools.islice(self._turns(), start, None)
        yield from _at(steps, lambda: [random.began for random in self._random])

    def _turns(self) -> Iterator[ReplicaPieces]:
        rows = itertools.zip_longest(*self._datasets, fillvalue=MISSING)
        elements = itertools.chain.from_iterable(rows)
        while step := ReplicaPieces(itertools.islice(elements, self._num_replicas)):
            step += [MISSING] * (self._num_replicas - len(step))
            yield step

    def num_steps(self) -> int | None:
        lengths = [*map(length_of, self._datasets)]
        if UNKNOWN_CARDINALITY in lengths:
            return None
        return max(-(-length * len(self._datasets) // self._num_replicas) for length in lengths)

    def state(self, communicator: Communicator, position: Any) -> dict[str, Any]:
        return {"random": communicator.all_gather_object(position, label=_STATE)}

    def position(self) -> Any:
        return [random.now() for random in self._random]

    def load_state(self, communicator: Communicator, state: dict[str, Any]) -> None:
        states = state["random"][communicator.rank]
        for random, saved in zip(self._random, states, strict=True):
            random.begin_at(saved)

    def state_schema(self) -> dict[str, Any]:
        return {"random": [[(None, dict)]]}
