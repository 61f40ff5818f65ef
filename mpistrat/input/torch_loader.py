"""Reads a torch `DataLoader`: only this rank's examples, through the loader's sampler, or all of its batches.

`LoaderReader` reads a DataLoader over a map-style dataset. All ranks use one order of the examples, and each rank loads
the examples of its own replicas only. With `shuffle=True` or `False`, rank 0 sends the state of its generator, and each
rank computes the order. Any other sampler runs on rank 0, and rank 0 sends the indices. If each rank shuffled for
itself, the ranks would read some examples twice and others never.

`WholeLoader` gives all batches of any other DataLoader.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

import torch
import torch.utils.data as data
from torch.utils.data.graph_settings import apply_random_seed, apply_sharding

from mpistrat.communicators import Communicator
from mpistrat.input import dataset_identity, readers
from mpistrat.input.batches import collate
from mpistrat.input.datasets import fetch
from mpistrat.input.dropped_examples import DroppedExamples, batch_of, batch_of_one
from mpistrat.input.random_state import RandomState, samplers_of
from mpistrat.input.readers import ReplayedReader, Restartable, State
from mpistrat.input.splitting import Lists, ReplicaPieces, joined, next_items, with_first_read
from mpistrat.input.worker_processes import WorkerInit, guarded, starting_processes, worker_context
from mpistrat.machine.notices import tell
from mpistrat.options import AutoShardPolicy
from mpistrat.replicas.input_plan import Share
from mpistrat.torch_distributed.next_group import has_default_group

# Index lists of torch's samplers in the first and the longest message. Messages are few and long, because all ranks
# wait at each of them. Rank 0's sampler runs ahead of the loading by one message.
_BATCHES_OF_FIRST_MESSAGE = 256
_BATCHES_OF_LONGEST = 4096
_OF_ALL_EXAMPLES = data.default_collate, data.default_convert, collate
_SAMPLER = "sampler of the distributed dataset: every rank must call next()"


def is_map_style(dataset: Any) -> TypeGuard[data.DataLoader[Any]]:
    """Whether `dataset` is a DataLoader that makes batches of a map-style dataset, so that examples load by index.

    If True, a `LoaderReader` reads it. False for anything that is no DataLoader, for streams, for a loader without
    batches (`batch_size=None`), and for a class that overrides DataLoader's iteration.

    Raises:
        ValueError: the loader's sampler already gives each rank a share of the examples.
    """
    if not isinstance(dataset, data.DataLoader):
        return False
    for sampler in samplers_of(dataset):
        if _takes_share(sampler):
            raise ValueError(
                f"the DataLoader has a {type(sampler).__name__}, which gives each rank a share of the examples, "
                "but the strategy itself divides GLOBAL batches. Use DataLoader(dataset, batch_size=GLOBAL, "
                "shuffle=True), without accelerate's prepare() or Fabric's setup_dataloaders(); or, if the loader "
                "gives batches of a replica's size, strategy.prepare(loader, local_batches=True)"
            )
    if dataset.batch_sampler is None or isinstance(dataset.dataset, data.IterableDataset):
        return False
    kind = type(dataset)
    base = data.DataLoader
    return kind.__iter__ is base.__iter__ and kind._get_iterator is base._get_iterator


def _takes_share(sampler: Any) -> bool:
    """Whether `sampler` gives one rank's share of the examples.

    A torch DistributedSampler does, and any sampler whose `num_replicas` (torch) or `num_processes` (accelerate)
    exceeds 1.
    """
    for name in ("num_replicas", "num_processes"):
        count = readers.number_of(sampler, name)
        if count is not None and count > 1:
            return True
    return isinstance(sampler, data.DistributedSampler)


class _WholePipe(data.IterableDataset[Any]):
    """All elements of a datapipe in one epoch, on every rank. A rank's worker processes share the elements out."""

    def __init__(self, pipe: data.IterDataPipe[Any], seed: int) -> None:
        self._pipe = pipe
        self._seed = seed

    def __iter__(self) -> Iterator[Any]:
        info = data.get_worker_info()
        pipe = apply_random_seed(self._pipe, torch.Generator().manual_seed(self._seed))
        workers = getattr(info, "num_workers", 1)
        number = getattr(info, "id", 0)
        apply_sharding(pipe, workers, number)
        return iter(pipe)


class WholeLoader(Restartable):
    """Iterates over all batches of a DataLoader, without forking a process that has started MPI.

    The loader's worker processes come from a forkserver, unless the program has chosen a `multiprocessing_context`.

    Args:
        loader: the program's DataLoader. It is not changed, but its samplers are used.
        whole_on: ranks that all get the whole datapipe in the same order, though torch has a default group and would
            share the datapipe out over it; None: torch shares it out.
        seed_id: the argument of `WorkerInit`; used for map-style datasets only. Worker processes of a stream keep
            torch's seeds, because ranks may shuffle the stream alike and take turns.
    """

    def __init__(
        self, loader: data.DataLoader[Any], whole_on: Communicator | None = None, seed_id: int = 0
    ) -> None:
        self._loader = loader
        self._whole_on = whole_on
        if isinstance(loader.dataset, data.IterableDataset):
            seed_id = 0
        if loader.num_workers:
            self._loader = _copy_of(loader, seed_id)
        self._user = loader
        self._known_epochs: dict[int, int] = {}
        for sampler in samplers_of(loader):
            if isinstance(sampler, data.DistributedSampler):
                self._known_epochs[id(sampler)] = sampler.epoch
        self.random = RandomState(loader)
        self.batch_size = loader.batch_size
        self.drop_last = loader.drop_last

    def __iter__(self) -> Iterator[Any]:
        with self.random.of_epoch(), starting_processes(self._user):
            loader = self._loader
            if self._whole_on is not None:
                loader = self._whole(self._whole_on)
            batches = guarded(iter(loader))
            return with_first_read(batches)  # samplers draw their seed at the first batch

    def _whole(self, ranks: Communicator) -> data.DataLoader[Any]:
        """Return a loader that gives each rank of `ranks` all elements of a datapipe, in the same order.

        Rank 0 draws the seed of the order.

        Called by: every rank of `ranks`, for each epoch.
        Returns: a copy of the loader that ignores torch's default group, because a DataLoader gives each rank of that
            group only a share of a datapipe. The loader itself if torch has no default group, or if the dataset is no
            datapipe: then each rank gets all elements anyway.
        """
        pipe = self._user.dataset
        if not (has_default_group() and isinstance(pipe, data.IterDataPipe)):
            return self._loader
        # A DataLoader draws a seed this way, and shares it over the default group.
        seed = ranks.broadcast_object(_drawn(self._user.generator), label="seed of the datapipe")
        loader = copy.copy(self._loader)
        # torch refuses to set these attributes. Persistent worker processes would keep the seed of the first epoch.
        vars(loader).update(dataset=_WholePipe(pipe, seed), persistent_workers=False)
        return loader

    def __len__(self) -> int:
        """Return the number of batches.

        Raises: TypeError for an IterableDataset: torch can only guess, because worker processes may share the stream
            out.
        """
        if isinstance(self._loader.dataset, data.IterableDataset):
            raise TypeError(
                "the number of batches of a DataLoader over an IterableDataset is not known"
            )
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the samplers and the dataset, before the epoch is read.

        A DistributedSampler keeps its epoch once the program has set an epoch itself.
        """
        _draw_no_second_seed(self._loader, epoch)
        known = self._known_epochs
        for part in _parts_of(self._loader):
            if id(part) not in known:
                readers.set_epoch(part, epoch)
            elif part.epoch == known[id(part)]:
                part.set_epoch(epoch)
                known[id(part)] = epoch
            else:
                known[id(part)] = -1


def _parts_of(loader: data.DataLoader[Any]) -> tuple[Any, ...]:
    """Return the parts of the loader that may have a `set_epoch`: the samplers and the dataset."""
    return (*samplers_of(loader), loader.dataset)


def _copy_of(loader: data.DataLoader[Any], seed_id: int, **changes: Any) -> data.DataLoader[Any]:
    """Return a copy of the loader. Its worker processes come from a forkserver, unless the loader has a context.

    Args:
        seed_id: the argument of `WorkerInit`.
        changes: attributes to set in the copy.
    """
    made = copy.copy(loader)
    vars(made).update(changes)  # torch refuses to set some of them
    made.multiprocessing_context = worker_context(loader)
    made.worker_init_fn = WorkerInit(loader, seed_id)
    made._iterator = None  # not the persistent worker processes of the program's loader
    return made


def _draw_no_second_seed(loader: data.DataLoader[Any], epoch: int) -> None:
    """Let persistent worker processes that start after epoch 0, because of a restart, draw from no generator.

    torch draws a seed for worker processes when it starts them. Without a restart, persistent ones started in epoch 0.
    A second seed would change the order of this epoch and of later ones.

    Streams stay as they are, because their order may come from that seed.

    Args: loader: a copy of the program's loader. Its `generator` is replaced: torch draws this seed from it, and the
        samplers have generators of their own.
    """
    starts = loader.persistent_workers and loader._iterator is None
    if epoch and starts and not isinstance(loader.dataset, data.IterableDataset):
        device = loader.generator.device if loader.generator else torch.get_default_device()
        seed = (torch.initial_seed() + epoch) % (1 << 63)
        loader.generator = torch.Generator(device).manual_seed(seed)


class _PieceSampler:
    """The batch sampler of this rank's loader: it yields the indices of this rank's pieces, one piece after the other.

    A piece is the part of a global batch that one replica takes. In place of an empty piece it yields one known index,
    so that the loader returns a batch for each piece, in the same order.

    Attributes:
        handed_out: steps that the loader is still loading. An entry is True for a piece with examples, else
            EMPTY or MISSING.
        known_indices: indices of some examples of the dataset.
        steps: the steps of this epoch that the loader has not asked for.
    """

    def __init__(self) -> None:
        self.handed_out: collections.deque[ReplicaPieces] = collections.deque()
        self.known_indices: Sequence[Any] = ()
        self.steps: Iterator[ReplicaPieces] = iter(())

    def __iter__(self) -> Iterator[list[Any]]:
        for step in self.steps:
            pieces = list(step)
            self.handed_out.append(step.replace_pieces(bool))
            for piece in pieces:
                yield piece or list(self.known_indices[:1])


@dataclass(frozen=True)
class _EpochPlan:
    """How a SequentialSampler or RandomSampler goes through an epoch.

    Rank 0 sends its plan, and each rank computes the order of the examples from the plan.

    Attributes:
        examples: number of examples in the epoch.
        batch_size: number of examples in a global batch.
        drop_last: whether a short last batch is left out.
        generator: state of a RandomSampler's generator; None for a SequentialSampler.
    """

    examples: int
    batch_size: int
    drop_last: bool
    generator: torch.Tensor | None

    @classmethod
    def of(cls, loader: data.DataLoader[Any]) -> _EpochPlan | None:
        """Return the plan of the next epoch; None if the loader has other samplers, and rank 0 must send the indices.

        Also None for a RandomSampler with replacement, or of only a part of the examples. For a RandomSampler without
        a generator, it draws a seed from torch's global CPU generator, as that sampler does.
        """
        batches = loader.batch_sampler
        sampler = cast("Any", loader.sampler)
        generator = None
        if type(batches) is not data.BatchSampler or batches.sampler is not sampler:
            return None
        if type(sampler) is data.RandomSampler:
            if sampler.replacement or len(sampler) != len(sampler.data_source):
                return None
            # A RandomSampler without a generator seeds one in this way.
            drawn = sampler.generator or torch.Generator().manual_seed(_drawn(None))
            generator = drawn.get_state()
        elif type(sampler) is not data.SequentialSampler:
            return None
        return cls(len(sampler), batches.batch_size, batches.drop_last, generator)

    def index_batches(self, of_sampler: torch.Generator | None) -> Iterator[list[int]]:
        """Yield a list of indices for each global batch of the epoch, as torch's samplers do.

        Args: of_sampler: this rank's sampler's generator, or None. It is left as after a RandomSampler's epoch.
        """
        order: Sequence[int] = range(self.examples)
        if self.generator is not None:
            generator = of_sampler or torch.Generator()
            generator.set_state(self.generator)
            order = _order(self.examples, generator).tolist()
        rest = self.examples % self.batch_size
        for first in range(0, self.examples - rest, self.batch_size):
            yield list(order[first : first + self.batch_size])
        if of_sampler is not None:  # at its end a RandomSampler draws another order and drops it
            _order(self.examples, of_sampler)
        if rest and not self.drop_last:
            yield list(order[self.examples - rest :])


def _drawn(generator: torch.Generator | None) -> int:
    """Draw a seed as a DataLoader does. Args: generator: the seed's source; None for torch's global CPU generator."""
    device = "cpu" if generator is None else generator.device
    return int(torch.empty((), dtype=torch.int64, device=device).random_(generator=generator))


def _order(examples: int, generator: torch.Generator) -> torch.Tensor:
    """Return a permutation of the examples as a RandomSampler draws it, on the generator's device."""
    return torch.randperm(examples, generator=generator, device=generator.device)


class LoaderReader(ReplayedReader):
    """Reads a DataLoader over a map-style dataset: each rank loads only the examples of its own replicas.

    In each epoch rank 0 broadcasts the order of the examples, so every rank must read. Under AutoShardPolicy.OFF each
    rank has its own order, and nothing is sent.

    Args: ahead: for samplers that are not torch's own, the number of batches in a message of rank 0.
    """

    _random: RandomState

    def __init__(
        self,
        loader: data.DataLoader[Any],
        share: Share,
        policy: AutoShardPolicy,
        communicator: Communicator,
        ahead: int = 1,
    ) -> None:
        super().__init__(share, policy)
        self._user = loader
        self._communicator = communicator
        self.asks_late = not all(
            type(sampler).__module__.startswith("torch.utils.data.")
            for sampler in samplers_of(loader)
        )
        self._ahead = ahead
        self._loader: data.DataLoader[Any] | None = None
        self._collate = loader.collate_fn
        self._may_drop = policy in readers.SHARED and loader.collate_fn not in _OF_ALL_EXAMPLES
        self._template: Any = None
        self._random = RandomState(loader)
        self._batch_sampler = cast("Iterable[Any]", loader.batch_sampler)
        self.batch_size = loader.batch_size or readers.number_of(loader.batch_sampler, "batch_size")
        self.drop_last = bool(getattr(loader.batch_sampler, "drop_last", False))
        self._steps_of((), Lists(), 0)  # raises if the workers have different numbers of replicas

    def steps(self, epoch: int, start: int) -> Iterator[ReplicaPieces]:
        """Yield the steps of an epoch: this rank's pieces of each global batch, collated by the loader's function.

        Before the first step the ranks compare their datasets, and rank 0 sends the order. Called by: every rank.
        """
        if self.ends_together:
            self._agree()  # first, because an error must not come while worker processes start
        for part in _parts_of(self._user):
            readers.set_epoch(part, epoch)
        if self._loader is None or not self._user.persistent_workers:
            # The loader must keep the order of the pieces, because `_PieceSampler.handed_out` has that order.
            how = {"batch_sampler": _PieceSampler(), "collate_fn": self._collate, "in_order": True}
            self._loader = _copy_of(self._user, self._share.pieces[0], **how)
        _draw_no_second_seed(self._loader, epoch)
        loader = self._loader
        sampler = cast("_PieceSampler", loader.batch_sampler)
        index_batches = joined(self._index_batches(sampler))
        sampler.handed_out.clear()
        sampler.steps = self._steps_of(index_batches, Lists(), start)
        batches = self._begin(loader, sampler)
        began = self._random.began
        if not loader.num_workers and not loader.pin_memory:
            # `_begin` has made torch's iterator only to draw its random numbers. Loading here takes less time.
            for step in sampler.steps:
                yield step.replace_pieces(self._loaded, began)
            return
        replicas = len(self._share.replicas)
        while len(loaded := next_items(batches, replicas)) == replicas:
            self._template = batch_of(loaded[0])
            step = sampler.handed_out.popleft()
            for i, (entry, batch) in enumerate(zip(step, loaded, strict=True)):
                if entry is True:  # else it is EMPTY or MISSING
                    step[i] = batch
            step.position = began
            yield step

    def _begin(self, loader: data.DataLoader[Any], sampler: _PieceSampler) -> Iterator[Any]:
        """Begin an epoch: start the worker processes, or, without any, read the first of `sampler.steps`.

        It replaces `sampler.steps` by an iterator over the same steps, if it has read the first.

        Returns: an iterator over the batches of `loader`, one for each piece of `sampler`.
        """
        generator = loader.generator
        # torch's iterator draws from the generator, into a tensor on the default device.
        device = contextlib.nullcontext() if generator is None else generator.device
        with self._random.of_epoch(), device:
            with starting_processes(self._user):
                batches = guarded(iter(loader))
            if not loader.num_workers:  # with worker processes, torch itself reads ahead
                # Samplers draw their seed at the first step.
                sampler.steps = with_first_read(sampler.steps)
        return batches

    def _fetch(self, indices: list[Any]) -> list[Any]:
        return fetch(self._user.dataset, indices)

    def _loaded(self, indices: list[Any]) -> Any:
        return self._collate(self._fetch(indices))

    def _index_batches(self, sampler: _PieceSampler) -> Iterator[Iterable[list[Any]]]:
        """Yield blocks of index lists; an index list names the examples of one global batch, in rank 0's order.

        Under AutoShardPolicy.OFF it yields this rank's own order of all batches. It also sets `sampler.known_indices`,
        and `examples` if they are known.

        Called by: every rank.
        """
        communicator = self._communicator
        if self._reads_all:
            for batch in self._batch_sampler:
                indices = list(batch)
                sampler.known_indices = sampler.known_indices or indices
                yield [indices]
            return
        with communicator.raising_together():
            plan = _EpochPlan.of(self._user)
        plan = communicator.broadcast_object(plan, label=_SAMPLER)
        if plan is not None:
            self.examples = plan.examples
            sampler.known_indices = range(plan.examples)
            yield plan.index_batches(getattr(self._user.sampler, "generator", None))
            return
        yield from self._blocks_of_first_rank(sampler)

    def _blocks_of_first_rank(self, sampler: _PieceSampler) -> Iterator[list[list[Any]]]:
        """Yield the blocks of index lists that rank 0 reads from its sampler and broadcasts. Called by: every rank.

        With samplers of torch, the first block has 256 batches, and later blocks up to 4096. Any other sampler is read
        by blocks of `ahead` batches, because the program may change it between two steps. A shorter block is the last.
        """
        communicator = self._communicator
        batches = iter(self._batch_sampler)
        if communicator.rank != 0:
            with communicator.raising_together():
                # The sampler draws its seed here, so that this rank's generator stays in step with rank 0's.
                next(batches, None)
            batches = iter(())  # rank 0's indices are used
        length = _BATCHES_OF_FIRST_MESSAGE
        longest = _BATCHES_OF_LONGEST
        if self.asks_late:
            length = longest = self._ahead
        while True:
            block: list[list[int]] = []
            with communicator.raising_together():
                block = next_items(map(list, batches), length)
            block = communicator.broadcast_object(block, label=_SAMPLER)
            if not sampler.known_indices:
                sampler.known_indices = next((indices for indices in block if indices), ())
            yield block
            if len(block) < length:
                return
            length = min(2 * length, longest)

    def _agree(self) -> None:
        """Compare the ranks' lengths of the dataset before each epoch, and the datasets before the first.

        Called by: every rank.
        If a rank's `collate_fn` may leave out examples that are None, all ranks count such examples from then on.

        Raises: ValueError on all ranks, if the lengths or the datasets differ.
        """
        entries: dict[str, Any] = {}
        if self._loader is None and self._communicator.size > 1:  # the first epoch
            entries = dataset_identity.entries_of(self._user, self._random)
        digest = zlib.crc32(repr(entries).encode())
        by_rank = self._communicator.all_gather_object(
            (readers.length_of(self._user.dataset), self._may_drop, digest), label=_SAMPLER
        )
        lengths, may_drop, digests = zip(*by_rank, strict=True)
        readers.check_alike("examples", lengths)
        if len(set(digests)) > 1:
            dataset_identity.check_alike(
                self._communicator.all_gather_object(entries, label="entries of the datasets")
            )
        if self.dropped is None and True in may_drop:
            self._collate = self.dropped = DroppedExamples(self._user.collate_fn)

    def cardinality(self) -> int:
        return readers.length_of(self._user)

    def length(self) -> int:
        if any(hasattr(part, "set_epoch") for part in _parts_of(self._user)):
            return readers.UNKNOWN_CARDINALITY  # each epoch may have a length of its own
        sampler = getattr(self._batch_sampler, "sampler", self._user.sampler)
        return readers.length_of(sampler)

    def template(self) -> Any:
        if self._template is None and self._loader is not None:
            indices = cast("_PieceSampler", self._loader.batch_sampler).known_indices
            self._template = batch_of_one(self._user.collate_fn, self._fetch, indices)
        return self._template

    def load_state(self, communicator: Communicator, state: State) -> None:
        self._loader = None  # persistent worker processes start again, as they do after a restart
        super().load_state(communicator, state)
        if communicator.rank == 0 and not self._random.fits(self._random.now()):
            tell(
                "the data was saved under another torch.set_default_device, so this epoch repeats or leaves out "
                "examples. Set the device of the program that saved, or begin a new epoch"
            )
