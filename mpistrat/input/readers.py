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
from mpistrat.input.splitting import (
    MISSING,
    Kind,
    Lists,
    ReplicaPieces,
    joined,
    next_items,
    with_first_read,
    without_first,
)
from mpistrat.machine.notices import ranks_in_words
from mpistrat.options import AutoShardPolicy
from mpistrat.replicas.input_plan import Share

if TYPE_CHECKING:
    from mpistrat.input.random_state import RandomState

# Under these policies each global batch is shared out separately, so all ranks know how many examples a replica gets.
SHARED = (AutoShardPolicy.AUTO, AutoShardPolicy.DATA)

UNKNOWN_CARDINALITY = -2
_STEPS_KNOWN = 4
State = dict[str, Any]  # the state of a distributed dataset, or the part of it that the reader adds
_STATE = "state of the order of a dataset"


def knowing_what_follows(steps: Iterator[ReplicaPieces]) -> Iterator[ReplicaPieces]:
    """Yield `steps`, and set each step's `following`: the number of later steps that have been read, at most 4.

    Ranks that know this number ask each other less often whether there is a further step. If reading fails, the steps
    that were read get `fails=True`, and the error is raised after them.
    """
    read: collections.deque[ReplicaPieces] = collections.deque()
    known = 0  # the first step does not wait for later ones
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
        ends_together: whether all ranks make the same number of steps without asking each other.
        steps_agreed: whether `num_steps` is equal on all ranks, and each rank makes that many steps.
        same_for_any_ranks: whether the same steps read the same examples on any number of ranks.
        batch_size: examples in a global batch (for a `FunctionReader`, in a replica's batch); None if unknown.
        drop_last: whether every batch is full.
        reads_ahead: whether another thread reads the steps before the program asks for them.
        asks_late: whether a step may depend on the program's work in the steps before it, because the program's own
            sampler chooses its examples. So a step is not read early, unless the options say so.
        dropped: the program's `collate_fn`, wrapped to count the examples that are None; None if no example is counted,
            then on all ranks.
        compares_ends: whether all ranks read the same data, and, at its end, compare their numbers of steps.
    """

    reads_ahead = False
    asks_late = False
    dropped: DroppedExamples | None = None
    compares_ends = False
    ends_together = True
    steps_agreed = False
    same_for_any_ranks = True
    batch_size: int | None = None
    drop_last = False

    @abc.abstractmethod
    def steps(self, epoch: int, start: int) -> Iterator[ReplicaPieces]:
        """Return an iterator over the steps of an epoch, from step number `start` on."""

    def num_steps(self) -> int | None:
        """Return this rank's number of steps in an epoch; None if it is not known in advance."""
        return None

    def cardinality(self) -> int:
        """Return the number of global batches of an epoch; -1: the batches never end; -2: not known in advance."""
        return UNKNOWN_CARDINALITY

    def end(self, communicator: Communicator, has_more: bool) -> None:  # noqa: B027
        """React to the end of an epoch, when the ranks have found that they make no further step. Here it does nothing.

        Called by: every rank.

        Args: has_more: whether this rank has a further step.
        """

    def template(self) -> Any:
        """Return a batch of one example, made like this rank's batches; None if there is no example yet.

        `AgreedSteps` copies its structure for a replica without examples.
        """
        return None

    def ends_short(self) -> bool:
        """Whether the last step of an epoch surely leaves a replica without examples."""
        return False

    def identity(self) -> dict[str, Any]:
        """Return the entries of a state that must be equal where it is loaded; in mid-epoch the length, too."""
        return {
            "source": type(self).__name__,
            "batch_size": self.batch_size,
            "length": self.length() if self.same_for_any_ranks else UNKNOWN_CARDINALITY,
        }

    def length(self) -> int:
        """Return the amount of data of an epoch: of examples, batches or files; -2 if it is not known."""
        return self.cardinality()

    def position(self) -> Any:
        """Return the position of the next epoch's first step, for `state`; after `load_state`, the loaded position.

        A position is the data that repeats an epoch's order, such as states of generators; None if nothing is needed.
        """
        return None

    def state(self, communicator: Communicator, position: Any) -> State:
        """Return the reader's part of a saved state: a dict, {} if epoch and step say all. Called by: every rank.

        Args: position: the reader's position after the program's last step (`ReplicaPieces.position`).
        """
        return {}

    def load_state(self, communicator: Communicator, state: State) -> None:
        """Let the next epoch go on from `state`, even if another number of ranks has saved it.

        Called by: every rank.
        """
        return

    def state_schema(self) -> dict[str, Any]:
        """Return the form of the results of `state`, for `checkpoint.schema`."""
        return {}


class Restartable(abc.ABC, Iterable[Any]):
    """An iterable of batches in a random order that can be repeated. `WholeLoader` is one.

    Attributes: random: the generators that choose the order.
    """

    random: RandomState


class _NoRandomState:
    """Stands in for a `RandomState` where the order of batches cannot be repeated."""

    began = None
    schema = (None, dict)

    def now(self) -> None:
        return None

    def begin_at(self, state: Any, steps: int) -> None:
        return None


def _random_of(batches: Any) -> RandomState | _NoRandomState:
    return batches.random if isinstance(batches, Restartable) else _NoRandomState()


def _at(steps: Iterator[ReplicaPieces], position: Callable[[], Any]) -> Iterator[ReplicaPieces]:
    """Yield `steps`, and set the `position` of each step to the result of `position()`.

    Args: position: called once, after the first step is read, because samplers draw their seed then.
    """
    steps = with_first_read(steps)
    at = position()
    for step in steps:
        step.position = at
        yield step


def set_epoch(batches: Any, epoch: int) -> None:
    """Call `batches.set_epoch(epoch)` if `batches` has that method, like torch's DistributedSampler."""
    if hasattr(batches, "set_epoch"):
        batches.set_epoch(epoch)


class GlobalReader(Reader):
    """The base of readers of global batches that are not files.

    With AutoShardPolicy.OFF, each worker uses the whole dataset for itself.

    Attributes: examples: number of examples in the epoch; 0 while that is not known.
    Raises: NotFoundError if the policy is FILE, and there are several workers.
    """

    _random: RandomState | _NoRandomState = _NoRandomState()
    examples = 0

    def __init__(self, share: Share, policy: AutoShardPolicy) -> None:
        if policy is AutoShardPolicy.FILE and share.workers > 1:
            raise NotFoundError(
                "AutoShardPolicy.FILE needs a mpistrat.input.FileDataset, because it shares out files; this dataset "
                "is none. Use AUTO or DATA"
            )
        self._share = share
        self._policy = policy
        self._reads_all = policy is AutoShardPolicy.OFF and share.workers > 1
        self.same_for_any_ranks = self.ends_together = not self._reads_all

    def position(self) -> Any:
        return self._random.now()

    def ends_short(self) -> bool:
        if self.drop_last or self.batch_size is None or self._policy not in SHARED:
            return False
        replicas = self._share.num_replicas
        rest = self.examples % self.batch_size
        return 0 < rest == splitting.slice_bounds(rest, replicas - 1, replicas)[0]

    def _steps_of(self, batches: Iterable[Any], kind: Kind, start: int) -> Iterator[ReplicaPieces]:
        """Yield the steps of this rank from step `start` on, cut from global `batches` by a rule of `splitting`.

        A piece is MISSING where the data ends before the step is full.
        """
        share = self._share
        n = share.num_replicas
        if self._policy in SHARED or self.batch_size is None or n == 1:
            if not self._reads_all:
                batches = without_first(batches, start)
                return splitting.pieces_of_each(batches, kind, share.pieces, n)
            all_pieces = splitting.pieces_of_each(batches, kind, range(n), n)
            pieces: Iterator[Any] = joined(all_pieces)
        else:
            sizes = share.sizes(self.batch_size)
            pieces = splitting.pieces_of_stream(batches, kind, sizes)
        steps = splitting.steps_of_stream(pieces, share)
        return without_first(steps, start)


class IndexReader(GlobalReader):
    """Reads a BatchedDataset: each rank loads the examples of its own replicas."""

    def __init__(self, dataset: BatchedDataset, share: Share, policy: AutoShardPolicy) -> None:
        super().__init__(share, policy)
        self._dataset = dataset
        self.examples = dataset.examples
        self.batch_size = dataset.batch_size
        self.drop_last = dataset.drop_last
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

    def length(self) -> int:
        return self._dataset.examples

    def template(self) -> Any:
        return batch_of_one(
            self._dataset.collate, self._dataset.fetch, range(self._dataset.examples)
        )


class ReplayedReader(GlobalReader):
    """The base of readers whose batches come in a random order that a saved state repeats.

    The state has rank 0's states of the random generators. Under AutoShardPolicy.OFF, where each worker has an order of
    its own, it has a list of every rank's states, in rank order.
    """

    def state(self, communicator: Communicator, position: Any) -> State:
        send = communicator.all_gather_object
        if self.same_for_any_ranks:
            send = communicator.broadcast_object
        return {"random": send(position, label=_STATE)}

    def load_state(self, communicator: Communicator, state: State) -> None:
        random = state["random"]
        if not self.same_for_any_ranks:
            random = random[communicator.rank]
        self._random.begin_at(random, state["steps"])

    def state_schema(self) -> dict[str, Any]:
        schema: Any = self._random.schema
        if not self.same_for_any_ranks:
            schema = [schema]
        return {"random": schema}


class BatchReader(ReplayedReader):
    """Reads an iterable of global batches whole on every rank, and keeps the pieces of this rank's replicas.

    The iterable may have `batch_size`, `drop_last`, a length, and `cardinality` (-1 if it never ends).

    Args:
        compared_over: the ranks that compare the first batch of each epoch, and their lengths; None compares nothing.
            The comparison finds iterables that each rank shuffles differently. Later batches are not compared: it would
            cost another pass over them.
    Raises: ValueError, in the first step, if the compared batches or lengths differ.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        share: Share,
        policy: AutoShardPolicy,
        compared_over: Communicator | None = None,
    ) -> None:
        super().__init__(share, policy)
        self._batches = batches
        self._compared_over = compared_over
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

    def cardinality(self) -> int:
        cardinality = number_of(self._batches, "cardinality")
        if cardinality is None:
            return length_of(self._batches)
        return cardinality


def number_of(batches: Any, name: str) -> int | None:
    """Return the attribute `name` of `batches` if it is an int, else None."""
    value = getattr(batches, name, None)
    return value if isinstance(value, int) else None


def length_of(dataset: Any) -> int:
    """Return `len(dataset)`; -2 if it raises any exception, because classes have exceptions of their own for that."""
    try:
        return len(dataset)
    except Exception:
        return UNKNOWN_CARDINALITY


def _alike(batches: Iterator[Any], length: int, communicator: Communicator) -> Iterator[Any]:
    """Return an iterator over all `batches`, after the ranks have compared the first batch and the lengths.

    Called by: every rank, at the beginning of an epoch.
    Args: length: this rank's number of batches; -2 if not known.
    Raises: ValueError if the checksums of the first batches differ, or known lengths do.
    """
    first = next_items(batches, 1)
    digest = 0
    for leaf in nest.flatten(first):
        if arrays.is_array(leaf):
            digest = zlib.crc32(arrays.to_numpy(leaf).tobytes(), digest)
    by_rank = communicator.all_gather_object((digest, length), label="first batch of the dataset")
    digests, lengths = zip(*by_rank, strict=True)
    check_alike("batches", lengths)
    if len(set(digests)) > 1:
        raise ValueError(
            "the ranks read different first batches, so some examples would be read twice and others never "
            f"(checksums by rank: {digests[:16]}). An iterable must yield the same GLOBAL batches on every rank: give "
            "its shuffle the same seed everywhere, or pass a torch DataLoader itself, with a progress bar around the "
            "distributed dataset"
        )
    return joined([first, batches])


def check_alike(unit: str, lengths: Sequence[Any]) -> None:
    """Compare the lengths of the ranks' datasets.

    Args:
        unit: "batches" or "examples", for the message.
        lengths: the length of each rank's dataset, in rank order; -2 if not known.
    Raises: ValueError if known lengths differ.
    """
    if len({*lengths} - {UNKNOWN_CARDINALITY}) > 1:
        runs = itertools.groupby(range(len(lengths)), lengths.__getitem__)
        by_rank = [f"{ranks_in_words(ranks)}: {length} {unit}" for length, ranks in runs]
        raise ValueError(
            f"the ranks read datasets of different lengths ({'; '.join(by_rank[:16])}), so some examples would never "
            "be read. Give every rank the same dataset: the same files, filtered alike; or, if each rank is to have "
            "data of its own, strategy.prepare(loader, local_batches=True)"
        )


def check_all_have_some(steps: Sequence[int]) -> None:
    """Check that no rank is without data while other ranks have some. Not collective.

    Args: steps: for each rank, in rank order, a number of steps that the rank has at least; 0: no data.
    Raises: ValueError if some ranks have no step, and others have.
    """
    ranks = len(steps)
    without = [rank for rank, count in enumerate(steps) if not count]
    with_data = ranks - len(without)
    if 0 < with_data < ranks:
        have = "has" if len(without) == 1 else "have"
        raise ValueError(
            f"{ranks_in_words(without)} of {ranks} {have} no data for a step, and an epoch ends with the shortest "
            f"rank: nothing would be trained. Give each rank data: cut it into {ranks} shards or more, use smaller "
            f"batches, or start fewer ranks ({with_data})"
        )


class FunctionReader(Reader):
    """Reads the results of a dataset function: batches of one replica, already sharded.

    Args: datasets: one dataset for each replica of this rank, or one for all. The replicas then take batches of it in
        turn.
    """

    ends_together = False
    same_for_any_ranks = False

    def __init__(self, datasets: list[Iterable[Any]], num_replicas: int) -> None:
        self._datasets = datasets
        self._num_replicas = num_replicas
        self._random = [_random_of(dataset) for dataset in datasets]
        self.drop_last = False not in [getattr(d, "drop_last", False) is True for d in datasets]
        self.batch_size = number_of(datasets[0], "batch_size")

    def steps(self, epoch: int, start: int) -> Iterator[ReplicaPieces]:
        for dataset in self._datasets:
            set_epoch(dataset, epoch)
        steps = without_first(self._turns(), start)
        yield from _at(steps, lambda: [random.began for random in self._random])

    def _turns(self) -> Iterator[ReplicaPieces]:
        """Yield steps with one batch for each replica; MISSING where a dataset has ended."""
        rows = itertools.zip_longest(*self._datasets, fillvalue=MISSING)
        batches = joined(rows)
        while step := ReplicaPieces(next_items(batches, self._num_replicas)):
            missing = self._num_replicas - len(step)
            step += [MISSING] * missing
            yield step

    def num_steps(self) -> int | None:
        lengths = [length_of(dataset) for dataset in self._datasets]
        if UNKNOWN_CARDINALITY in lengths:
            return None
        batches = max(lengths) * len(self._datasets)
        return -(-batches // self._num_replicas)

    def state(self, communicator: Communicator, position: Any) -> State:
        return {"random": communicator.all_gather_object(position, label=_STATE)}

    def position(self) -> Any:
        return [random.now() for random in self._random]

    def load_state(self, communicator: Communicator, state: State) -> None:
        states = state["random"][communicator.rank]
        for random, saved in zip(self._random, states, strict=True):
            random.begin_at(saved, state["steps"])

    def state_schema(self) -> dict[str, Any]:
        return {"random": [[(None, dict)]]}
