"""A torch `DataLoader`, read through its sampler or whole.

`LoaderReader` reads one over a map-style dataset. All ranks use one order of the examples, and each rank loads the
examples of its own replicas only. With `shuffle=True` or `False` rank 0 sends the state of its generator, and each rank
computes the order. Any other sampler runs on rank 0, which sends the indices. If each rank shuffled for
itself, some examples would be read twice and others never.

`WholeLoader` gives all batches of any other DataLoader.
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
from mpistrat.input.worker_processes import WorkerInit, guarded, starting_processes, worker_context
from mpistrat.machine.notices import tell
from mpistrat.options import AutoShardPolicy
from mpistrat.replicas.input_plan import Share

# Ranks wait for the slowest of them at each message: few are sent. Rank 0's sampler runs ahead by as much.
_BATCHES_OF_FIRST_MESSAGE, _BATCHES_OF_LONGEST = 256, 4096
_OF_ALL_EXAMPLES = data.default_collate, data.default_convert, collate
_SAMPLER = "sampler of the distributed dataset: every rank must call next()"


def is_map_style(dataset: Any) -> TypeGuard[data.DataLoader[Any]]:
    """Whether `dataset` is a DataLoader of batches over a map-style dataset: examples can be loaded by their indices.

    It is not where the class of the loader iterates in a way of its own.

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
    """The elements of a datapipe in an epoch: all on every rank, shared out among worker processes."""

    def __init__(self, pipe: data.IterDataPipe[Any], seed: int) -> None:
        self._pipe, self._seed = pipe, seed

    def __iter__(self) -> Iterator[Any]:
        info = data.get_worker_info()
        pipe = apply_random_seed(self._pipe, torch.Generator().manual_seed(self._seed))
        apply_sharding(pipe, *((1, 0) if info is None else (info.num_workers, info.id)))
        return iter(pipe)


class WholeLoader(Restartable):
    """A DataLoader that is read as it is, but with worker processes that can live beside MPI.

    Args:
        whole_on: the ranks each of which gets all elements, in the same order, of a datapipe that torch would share
            out over the ranks of a default group; None: as torch does.
        seed_id: as of `WorkerInit`. Worker processes of a stream keep torch's seeds: ranks may shuffle it alike, and
            take turns.
    """

    def __init__(
        self, loader: data.DataLoader[Any], whole_on: Communicator | None = None, seed_id: int = 0
    ) -> None:
        self._loader = loader
        self._whole_on = whole_on
        seed_id *= not isinstance(loader.dataset, data.IterableDataset)
        if loader.num_workers and (seed_id or loader.multiprocessing_context is None):
            self._loader = _copy_of(loader, seed_id)
        self._user = loader
        self._known_epochs = {
            id(s): s.epoch for s in samplers_of(loader) if isinstance(s, data.DistributedSampler)
        }
        self.random = RandomState(loader)
        self.batch_size, self.drop_last = loader.batch_size, loader.drop_last

    def __iter__(self) -> Iterator[Any]:
        with self.random.of_epoch(), starting_processes(self._user):
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
        # torch refuses to set them. Worker processes that persist would go on with the seed of the first epoch.
        vars(loader).update(dataset=_WholePipe(pipe, seed), persistent_workers=False)
        return loader

    def __len__(self) -> int:
        """Raises: TypeError where torch can only guess, of an IterableDataset that worker processes share out."""
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


def _copy_of(loader: data.DataLoader[Any], seed_id: int, **changes: Any) -> data.DataLoader[Any]:
    """A copy with worker processes that can live beside MPI. Args: seed_id: as of `WorkerInit`."""
    made = copy.copy(loader)
    vars(made).update(changes)  # torch refuses to set some
    made.multiprocessing_context = worker_context(loader)
    made.worker_init_fn = WorkerInit(loader, seed_id)
    made._iterator = None  # persistent worker processes of the user's own
    return made


class _PieceSampler:
    """The batch sampler of this rank's loader: it gives the indices of this rank's pieces, one piece after the other.

    An empty piece becomes the first of `known_indices`, so every rank's loader loads as many pieces at the same times.

    Attributes:
        handed_out: steps with pieces that the loader has asked for. True stands for a piece with examples.
        known_indices: indices of some examples of the dataset.
        steps: the steps of this epoch that the loader has not asked for.
    """

    def __init__(self) -> None:
        self.handed_out: collections.deque[ReplicaPieces] = collections.deque()
        self.known_indices: Sequence[Any] = ()
        self.steps: Iterator[ReplicaPieces] = iter(())

    def begin(self, steps: Iterator[ReplicaPieces]) -> None:
        """Begin an epoch of `steps`."""
        self.handed_out.clear()
        self.steps = steps

    def read_first_step(self) -> None:
        """Read the first step now: samplers draw their seed then."""
        self.steps = itertools.chain(list(itertools.islice(self.steps, 1)), self.steps)

    def __iter__(self) -> Iterator[list[Any]]:
        for step in self.steps:
            pieces = list(step)
            self.handed_out.append(step.replace_pieces(bool))
            for piece in pieces:
                yield piece or list(self.known_indices[:1])


@dataclass(frozen=True)
class _EpochPlan:
    """How a SequentialSampler or RandomSampler goes through an epoch: rank 0 sends it, each rank computes the order.

    Attributes:
        generator: the state of the generator of a RandomSampler, None for a SequentialSampler.
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
    """Of a DataLoader over a map-style dataset: see `is_map_style`."""

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
            self._agree()  # before there are worker processes: an error would end them while they start
        for part in _parts_of(self._user):
            readers.set_epoch(part, epoch)
        if self._loader is None or not self._user.persistent_workers:
            # In the order of the pieces, for `_PieceSampler.handed_out` goes with them.
            how = {"batch_sampler": _PieceSampler(), "collate_fn": self._collate, "in_order": True}
            self._loader = _copy_of(self._user, self._share.pieces[0], **how)
        loader, sampler = self._loader, cast("_PieceSampler", self._loader.batch_sampler)
        index_batches = itertools.chain.from_iterable(self._index_batches(sampler))
        sampler.begin(self._steps_of(index_batches, Lists(), start))
        batches = self._begin(loader, sampler)
        began = self._random.began
        if not loader.num_workers and not loader.pin_memory:
            # The iterator was made for what it draws: to load the examples here takes less time.
            for step in sampler.steps:
                yield step.replace_pieces(self._loaded, began)
            return
        k = len(self._share.replicas)
        while len(loaded := list(itertools.islice(batches, k))) == k:
            self._template = batch_of(loaded[0])
            step = sampler.handed_out.popleft()
            entries = zip(loaded, step, strict=True)
            step[:] = [batch if kind is True else kind for batch, kind in entries]
            step.position = began
            yield step

    def _begin(self, loader: data.DataLoader[Any], sampler: _PieceSampler) -> Iterator[Any]:
        """The batches of an epoch: `loader` makes them of the pieces of `sampler`, its batch sampler."""
        generator = loader.generator
        # torch's iterator draws from it, into a tensor on the default device.
        device = contextlib.nullcontext() if generator is None else generator.device
        with self._random.of_epoch(), device:
            with starting_processes(self._user):
                batches = guarded(iter(loader))
            if not loader.num_workers:  # otherwise the worker processes have their first indices
                sampler.read_first_step()
        return batches

    def _loaded(self, indices: list[Any]) -> Any:
        return self._collate(self._fetch(indices))

    def _index_batches(self, sampler: _PieceSampler) -> Iterator[Iterable[list[Any]]]:
        """The index lists of the global batches, some at a time: the same on all ranks, in the order of rank 0.

        Where this rank reads all batches (AutoShardPolicy.OFF), its own sampler gives them. `sampler` gets
        `known_indices`.
        """
        communicator = self._communicator
        if self._reads_all:
            for batch in map(list, self._batch_sampler):
                sampler.known_indices = sampler.known_indices or batch
                yield [batch]
            return
        with communicator.raising_together():
            plan = _EpochPlan.of(self._user)
        plan = communicator.broadcast_object(plan, label=_SAMPLER)
        if plan is not None:
            sampler.known_indices = range(plan.examples)
            yield plan.index_batches(getattr(self._user.sampler, "generator", None))
            return
        yield from self._blocks_of_first_rank(sampler)

    def _blocks_of_first_rank(self, sampler: _PieceSampler) -> Iterator[list[list[Any]]]:
        """Index lists of rank 0's sampler, in few messages."""
        communicator = self._communicator
        batches = iter(self._batch_sampler)
        if communicator.rank != 0:
            with communicator.raising_together():
                # A sampler draws its seed from the rank's generator: the ranks' generators stay in step.
                next(batches, None)
            batches = iter(())  # those of rank 0 are used
        length = _BATCHES_OF_FIRST_MESSAGE
        while True:
            block: list[list[int]] = []
            with communicator.raising_together():
                block = [list(batch) for batch in itertools.islice(batches, length)]
            block = communicator.broadcast_object(block, label=_SAMPLER)
            sampler.known_indices = sampler.known_indices or next(filter(None, block), ())
            yield block
            if len(block) < length:
                return
            length = min(2 * length, _BATCHES_OF_LONGEST)

    def _agree(self) -> None:
        """Compare the datasets' lengths. If the `collate_fn` of one rank may drop examples, all ranks count them."""
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
            indices = cast("_PieceSampler", self._loader.batch_sampler).known_indices
            self._template = batch_of_one(self._user.collate_fn, self._fetch, indices)
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
