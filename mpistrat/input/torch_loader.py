"""A torch `DataLoader`, read through its sampler or whole.

That over a map-style dataset is re-sharded through its sampler: rank 0's decides for all, and each rank loads the
examples of its own replicas only. Slicing each rank's own shuffle instead would read some examples twice and others
never.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

import torch
import torch.distributed as dist
import torch.utils.data as data
from torch.utils.data.graph_settings import apply_random_seed, apply_sharding

from mpistrat.communicators import Communicator
from mpistrat.input import readers
from mpistrat.input.batches import collate
from mpistrat.input.datasets import fetch
from mpistrat.input.dropped_examples import DroppedExamples, batch_of, batch_of_one
from mpistrat.input.random_state import RandomState, samplers_of
from mpistrat.input.readers import GlobalReader, Restartable
from mpistrat.input.splitting import Lists, ReplicaPieces
from mpistrat.input.worker_processes import WorkerInit, guarded, starting_workers, worker_context
from mpistrat.machine.notices import tell
from mpistrat.options import AutoShardPolicy
from mpistrat.replicas.input_plan import Share

# Ranks wait for the slowest of them at each message: few are sent. Rank 0's sampler runs ahead by as much.
_BATCHES_OF_FIRST_MESSAGE, _BATCHES_OF_LONGEST = 256, 4096
_OF_ALL_EXAMPLES = data.default_collate, data.default_convert, collate
_SAMPLER = "sampler of the distributed dataset: every rank must call next()"


def is_map_style(dataset: Any) -> TypeGuard[data.DataLoader[Any]]:
    """Whether `dataset` is a DataLoader of batches whose examples can be asked for by index.

    Raises:
        ValueError: its sampler already takes one rank's share.
    """
    if not isinstance(dataset, data.DataLoader):
        return False
    for sampler in samplers_of(dataset):
        if _takes_share(sampler):
            raise ValueError(
                f"the DataLoader has a {type(sampler).__name__}, which gives each rank a share of the examples; "
                "here the loader yields GLOBAL batches and the strategy shares them out. Use "
                "DataLoader(dataset, batch_size=GLOBAL, shuffle=True), and leave out what has sharded it, as "
                "accelerate's prepare() and Fabric's setup_dataloaders() do; or say that the loader gives each rank "
                "its part, with batches of a replica's size: strategy.prepare(loader, local_batches=True)"
            )
    streams = dataset.batch_sampler is None or isinstance(dataset.dataset, data.IterableDataset)
    return not (streams or _iterates_itself(dataset))


def _takes_share(sampler: Any) -> bool:
    """Whether it is torch's, or has the words of torch or of accelerate for one rank of several."""
    counts = (getattr(sampler, name, None) for name in ("num_replicas", "num_processes"))
    shards = any(isinstance(count, int) and count > 1 for count in counts)
    return isinstance(sampler, data.DistributedSampler) or shards


def _iterates_itself(loader: data.DataLoader[Any]) -> bool:
    """Whether its class makes something else of its sampler's batches than a DataLoader does."""
    return any(
        getattr(type(loader), name, None) is not getattr(data.DataLoader, name, None)
        for name in ("__iter__", "_get_iterator")
    )


class _WholePipe(data.IterableDataset[Any]):
    """The elements of a datapipe in an epoch: all on every rank, shared out among the workers of a DataLoader."""

    def __init__(self, pipe: data.IterDataPipe[Any], seed: int) -> None:
        self._pipe, self._seed = pipe, seed

    def __iter__(self) -> Iterator[Any]:
        info = data.get_worker_info()
        pipe = apply_random_seed(self._pipe, torch.Generator().manual_seed(self._seed))
        apply_sharding(pipe, *((1, 0) if info is None else (info.num_workers, info.id)))
        return iter(pipe)


class WholeLoader(Restartable):
    """A DataLoader that is read as it is, but with workers that can live beside MPI.

    Args:
        whole_on: the ranks each of which gets all elements, in the same order, of a datapipe that torch would share
            out over the ranks of a default group; None: as torch does.
        reader: as of `WorkerInit`. Workers of a stream keep torch's seeds: ranks may shuffle it alike and take turns.
    """

    def __init__(
        self, loader: data.DataLoader[Any], whole_on: Communicator | None = None, reader: int = 0
    ) -> None:
        self._loader = loader
        self._whole_on = whole_on
        reader *= not isinstance(loader.dataset, data.IterableDataset)
        if loader.num_workers and (reader or loader.multiprocessing_context is None):
            self._loader = _copy_of(loader, reader)
        self._user = loader
        self._known_epochs = {
            id(s): s.epoch for s in samplers_of(loader) if isinstance(s, data.DistributedSampler)
        }
        self.random = RandomState(loader)
        self.batch_size, self.drop_last = loader.batch_size, loader.drop_last

    def __iter__(self) -> Iterator[Any]:
        with self.random.of_epoch(), starting_workers(self._user):
            loader = self._loader if self._whole_on is None else self._whole(self._whole_on)
            batches = guarded(iter(loader))
            first = list(itertools.islice(batches, 1))  # samplers draw their seed now
        return itertools.chain(first, batches)

    def _whole(self, ranks: Communicator) -> data.DataLoader[Any]:
        """The loader; beside a default group, one whose datapipe all `ranks` read whole, by rank 0's random numbers."""
        pipe = self._user.dataset
        has_group = dist.is_available() and dist.is_initialized()
        if not (has_group and isinstance(pipe, data.IterDataPipe)):
            return self._loader
        # As a DataLoader draws it, and has its ranks share it.
        seed = ranks.broadcast_object(_drawn(self._user.generator), label="seed of the datapipe")
        loader = copy.copy(self._loader)
        # torch refuses to set them. Workers that persist would go on with the seed of the first epoch.
        vars(loader).update(dataset=_WholePipe(pipe, seed), persistent_workers=False)
        return loader

    def __len__(self) -> int:
        """Raises: TypeError where torch can only guess, of an IterableDataset that workers share out."""
        if isinstance(self._loader.dataset, data.IterableDataset):
            raise TypeError(
                "the number of batches of a DataLoader over an IterableDataset is not known"
            )
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Of all parts; but a DistributedSampler whose epoch the program has set is left to it."""
        for part in _parts_of(self._loader):
            if id(part) not in self._known_epochs:
                readers.set_epoch(part, epoch)
            elif part.epoch == self._known_epochs[id(part)]:
                part.set_epoch(epoch)
                self._known_epochs[id(part)] = epoch
            else:
                self._known_epochs[id(part)] = -1


def _parts_of(loader: data.DataLoader[Any]) -> tuple[Any, ...]:
    """Those that may want to know of epochs."""
    return (*samplers_of(loader), loader.dataset)


def _copy_of(loader: data.DataLoader[Any], reader: int, **changes: Any) -> data.DataLoader[Any]:
    """A copy whose workers can live beside MPI. Args: reader: as of `WorkerInit`."""
    made = copy.copy(loader)
    vars(made).update(changes)  # torch refuses to set some
    made.multiprocessing_context = worker_context(loader)
    made.worker_init_fn = WorkerInit(loader, reader)
    made._iterator = None  # persistent workers of the user's own
    return made


class _Pieces:
    """A batch sampler: the indices of this rank's pieces, in turn, of the epoch that was begun last.

    In place of a piece without examples it gives the first of `some`: so every rank's loader asks for as many pieces at
    the same times. Of each step, `read` has True in place of the pieces with examples, and says how many these are.
    """

    def __init__(self) -> None:
        self.read: collections.deque[ReplicaPieces] = collections.deque()
        self.some: Sequence[Any] = ()
        self.steps: Iterator[ReplicaPieces] = iter(())

    def begin(self, steps: Iterator[ReplicaPieces]) -> None:
        self.read.clear()
        self.steps = steps

    def draw(self) -> None:
        """Take the first now: samplers draw their seed then."""
        self.steps = itertools.chain(list(itertools.islice(self.steps, 1)), self.steps)

    def __iter__(self) -> Iterator[list[Any]]:
        for step in self.steps:
            pieces = list(step)
            self.read.append(step.load(bool))
            for piece in pieces:
                yield piece or list(self.some[:1])


@dataclass(frozen=True)
class _EpochPlan:
    """What torch's own samplers do in an epoch: all ranks can do it, where they know as much as rank 0.

    Attributes:
        generator: the state of what a RandomSampler draws from, None for a SequentialSampler.
    """

    examples: int
    batch_size: int
    drop_last: bool
    generator: torch.Tensor | None

    @classmethod
    def of(cls, loader: data.DataLoader[Any]) -> _EpochPlan | None:
        """Of the next epoch; None for another sampler. Draws what the sampler draws."""
        batches, sampler, generator = loader.batch_sampler, cast("Any", loader.sampler), None
        if type(batches) is not data.BatchSampler or batches.sampler is not sampler:
            return None
        if type(sampler) is data.RandomSampler:
            if sampler.replacement or len(sampler) != len(sampler.data_source):
                return None
            # As a RandomSampler seeds one.
            drawn = sampler.generator or torch.Generator().manual_seed(_drawn(None))
            generator = drawn.get_state()
        elif type(sampler) is not data.SequentialSampler:
            return None
        return cls(len(sampler), batches.batch_size, batches.drop_last, generator)

    def index_batches(self, of_sampler: torch.Generator | None) -> Iterator[list[int]]:
        """Of an epoch, as torch's samplers give them. The generator `of_sampler` goes on as with torch."""
        order: Sequence[int] = range(self.examples)
        if self.generator is not None:
            generator = of_sampler or torch.Generator()
            generator.set_state(self.generator)
            order = _order(self.examples, generator).tolist()
        rest = self.examples % self.batch_size
        for first in range(0, self.examples - rest, self.batch_size):
            yield list(order[first : first + self.batch_size])
        if of_sampler is not None:  # a RandomSampler ends with an order of which it takes none
            _order(self.examples, of_sampler)
        if rest and not self.drop_last:
            yield list(order[self.examples - rest :])


def _drawn(generator: torch.Generator | None) -> int:
    """A seed, as a DataLoader draws it. Args: generator: None for the host's own."""
    device = "cpu" if generator is None else generator.device
    return int(torch.empty((), dtype=torch.int64, device=device).random_(generator=generator))


def _order(examples: int, generator: torch.Generator) -> torch.Tensor:
    """As a RandomSampler draws it; on the device of `generator`, whatever torch's default device."""
    return torch.randperm(examples, generator=generator, device=generator.device)


class LoaderReader(GlobalReader):
    """Of a DataLoader over a map-style dataset."""

    _random: RandomState

    def __init__(
        self,
        loader: data.DataLoader[Any],
        share: Share,
        policy: AutoShardPolicy,
        communicator: Communicator,
    ) -> None:
        super().__init__(share, policy)
        self._user = loader
        self._communicator = communicator
        self._loader: data.DataLoader[Any] | None = None
        self._fetch = functools.partial(fetch, loader.dataset)
        self._collate = loader.collate_fn
        self._may_drop = policy in readers.SHARED and loader.collate_fn not in _OF_ALL_EXAMPLES
        self._template: Any = None
        self._random = RandomState(loader)
        self._batch_sampler = cast("Iterable[Any]", loader.batch_sampler)
        self.batch_size = loader.batch_size or readers.number_of(loader.batch_sampler, "batch_size")
        self.drop_last = bool(getattr(loader.batch_sampler, "drop_last", False))
        self._steps_of((), Lists(), 0)  # raises for what cannot be

    def steps(self, epoch: int, start: int) -> Iterator[ReplicaPieces]:
        """One epoch: of each global batch this rank's pieces, collated by the loader's function."""
        if self.ends_together:
            self._agree()  # before there are workers: an error would end them while they start
        for part in _parts_of(self._user):
            readers.set_epoch(part, epoch)
        if self._loader is None or not self._user.persistent_workers:
            # In the order of the pieces, for `_Pieces.read` goes with them.
            how = {"batch_sampler": _Pieces(), "collate_fn": self._collate, "in_order": True}
            self._loader = _copy_of(self._user, self._share.pieces[0], **how)
        loader, pieces = self._loader, cast("_Pieces", self._loader.batch_sampler)
        batches = self._begin(loader, pieces, start)
        began = self._random.began
        if not loader.num_workers and not loader.pin_memory:
            # What `batches` does, in less time.
            for step in pieces.steps:
                yield step.load(self._loaded, began)
            return
        k = len(self._share.replicas)
        while len(loaded := list(itertools.islice(batches, k))) == k:
            self._template = batch_of(loaded[0])
            step = pieces.read.popleft()
            entries = zip(loaded, step, strict=True)
            step[:] = [batch if kind is True else kind for batch, kind in entries]
            step.position = began
            yield step

    def _begin(self, loader: data.DataLoader[Any], pieces: _Pieces, start: int) -> Iterator[Any]:
        """The batches of an epoch that `loader` makes of `pieces`."""
        generator = loader.generator
        # torch's iterator draws from it, into a tensor on the default device.
        device = contextlib.nullcontext() if generator is None else generator.device
        with self._random.of_epoch(), device:
            index_batches = itertools.chain.from_iterable(self._index_batches(pieces))
            pieces.begin(self._steps_of(index_batches, Lists(), start))
            with starting_workers(self._user):
                batches = guarded(iter(loader))
            if not loader.num_workers:  # otherwise the workers have their first indices
                pieces.draw()
        return batches

    def _loaded(self, indices: list[Any]) -> Any:
        return self._collate(self._fetch(indices))

    def _index_batches(self, pieces: _Pieces) -> Iterator[Iterable[list[Any]]]:
        """The index lists of the global batches, some at a time, as rank 0's sampler gives them.

        `pieces` learns of some examples.
        """
        communicator = self._communicator
        if self._reads_all:
            for batch in map(list, self._batch_sampler):
                pieces.some = pieces.some or batch
                yield [batch]
            return
        with communicator.raising_together():
            plan = _EpochPlan.of(self._user)
        plan = communicator.broadcast_object(plan, label=_SAMPLER)
        if plan is not None:
            pieces.some = range(plan.examples)
            yield plan.index_batches(getattr(self._user.sampler, "generator", None))
            return
        yield from self._blocks_of_first_rank(pieces)

    def _blocks_of_first_rank(self, pieces: _Pieces) -> Iterator[list[list[Any]]]:
        communicator = self._communicator
        batches = iter(self._batch_sampler)
        if communicator.rank != 0:
            with communicator.raising_together():
                # A sampler draws its seed from the rank's generator: the ranks' generators stay in step.
                next(batches, None)
            batches = iter(())  # rank 0's count
        length = _BATCHES_OF_FIRST_MESSAGE
        while True:
            block: list[list[int]] = []
            with communicator.raising_together():
                block = [list(batch) for batch in itertools.islice(batches, length)]
            block = communicator.broadcast_object(block, label=_SAMPLER)
            pieces.some = pieces.some or next(filter(None, block), ())
            yield block
            if len(block) < length:
                return
            length = min(2 * length, _BATCHES_OF_LONGEST)

    def _agree(self) -> None:
        """Compare the lengths of the datasets. All ranks count the examples that came, if one of them has to."""
        by_rank = self._communicator.all_gather_object(
            (readers.length_of(self._user.dataset), self._may_drop), label=_SAMPLER
        )
        lengths, may_drop = zip(*by_rank, strict=True)
        readers.check_alike("examples", lengths)
        if self.dropped is None and True in may_drop:
            self._collate = self.dropped = DroppedExamples(self._user.collate_fn)

    def cardinality(self) -> int:
        return readers.length_of(self._user)

    def template(self) -> Any:
        if self._template is None and self._loader is not None:
            some = cast("_Pieces", self._loader.batch_sampler).some
            self._template = batch_of_one(self._user.collate_fn, self._fetch, some)
        return self._template

    def state(self, communicator: Communicator, position: Any) -> dict[str, Any]:
        """The order of the epoch: what rank 0's random numbers were, or will be, when it begins."""
        return {"random": communicator.broadcast_object(position, label="state of the sampler")}

    def load_state(self, communicator: Communicator, state: dict[str, Any]) -> None:
        fits = self._random.fits(state["random"])
        if communicator.rank == 0 and not fits:
            tell(
                "the data was saved under another torch.set_default_device, so this epoch repeats or leaves out "
                "examples. Set the device of the program that saved, or begin a new epoch"
            )
        self._random.begin_at(state["random"])

    def state_schema(self) -> dict[str, Any]:
        return {"random": self._random.schema}
