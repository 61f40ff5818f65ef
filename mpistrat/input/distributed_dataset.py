"""What `experimental_distribute_dataset` and `distribute_datasets_from_function` return."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from mpistrat import nest
from mpistrat.communicators import Communicator
from mpistrat.input.batches import spec_of
from mpistrat.input.datasets import BatchedDataset, FileDataset
from mpistrat.input.device_copies import DeviceCopies
from mpistrat.input.distributed_iterator import DistributedIterator, Progress
from mpistrat.input.element_spec import PerReplicaSpec
from mpistrat.input.file_reader import FileReader
from mpistrat.input.readers import (
    BatchReader,
    FunctionReader,
    IndexReader,
    Reader,
)
from mpistrat.options import AutoShardPolicy, InputOptions
from mpistrat.replicas.input_plan import Share
from mpistrat.trace import spans

if TYPE_CHECKING:
    from mpistrat.replicas.extended import StrategyExtended


T = TypeVar("T")


class DistributedDataset(Iterable[Any]):
    """Steps of per-replica batches; made by a strategy.

    Each iteration over it is an epoch, and every rank must iterate. With one replica per rank a step is
    that replica's batch; with several it is a structure of `PerReplica` batches.

    Attributes:
        partial: a step is made as long as any replica of any rank has data, the others get batches of no examples.
            Otherwise a step that cannot fill every replica of this rank ends the epoch.
    """

    def __init__(
        self, reader: Reader, extended: StrategyExtended, options: InputOptions, partial: bool
    ) -> None:
        self._reader, self._extended, self._options = reader, extended, options
        self.partial = partial and not reader.drop_last
        self._epoch = 0
        self._start = 0
        # Of the iteration that was begun last
        self._last: weakref.ref[DistributedIterator] | None = None
        self._progress: Progress | None = None
        # The next, whose first step was read for its spec
        self._peeked: DistributedIterator | None = None
        self._spec: Any = None
        self._read_ahead: int | None = None

    @property
    def strategy(self) -> Any:
        """Whose replicas it gives batches to."""
        return self._extended.strategy

    def __iter__(self) -> DistributedIterator:
        epoch, start = self._epoch, self._start
        self._epoch, self._start = epoch + 1, 0
        iterator = self._peeked or DistributedIterator(self, epoch, start)
        self._has_begun(iterator)
        return iterator

    def _has_begun(self, iterator: DistributedIterator) -> None:
        self._last, self._progress = weakref.ref(iterator), iterator.progress
        self._peeked = None

    def go_on_with(self, iterator: DistributedIterator) -> None:
        """Let `iterator` be the one that was begun last; the epochs after its follow."""
        self._epoch, self._start = iterator.progress.epoch + 1, 0
        self._has_begun(iterator)

    def __len__(self) -> int:
        """Steps of an epoch. Raises: TypeError when that is not known before it ends."""
        steps = self._reader.num_steps()
        if steps is None and self._reader.ends_together and self.cardinality >= 0:
            steps = self.cardinality
        if steps is None:
            raise TypeError("the number of steps of this distributed dataset is not known")
        return steps

    @property
    def cardinality(self) -> int:
        """Global batches of an epoch; -1: they never end, -2: it is not known before."""
        return self._reader.cardinality()

    @property
    def element_spec(self) -> Any:
        """The structure of a step, with an ArraySpec (PerReplicaSpec with more than one replica) for each array.

        Reads the first batch, where none was read yet. Called by: every rank.
        """
        if self._spec is None and (last := self._last and self._last()):
            last.peek()
        if self._spec is None:
            self._peeked = self._peeked or DistributedIterator(self, self._epoch, self._start)
            self._peeked.peek()
        return self._spec

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """`reduce_func(state, step)` over the steps of an epoch."""
        state = initial_state
        for step in self:
            state = reduce_func(state, step)
        return state

    def state_dict(self) -> dict[str, Any]:
        """Where the iteration that was begun last stands; see `DistributedIterator.state_dict`."""
        with spans.current.range("dataset.state_dict"):
            progress = self._peeked.progress if self._peeked else self._progress
            return self.state_at(progress or Progress(self._epoch, self._start))

    def state_at(self, progress: Progress) -> dict[str, Any]:
        """The state of an iterator that has come so far. Called by: every rank."""
        if progress.unread is not None:
            return progress.unread
        if progress.ended:  # it goes on with the next epoch
            progress = Progress(progress.epoch + 1)
        communicator = self._extended.communicator
        return {
            "epoch": progress.epoch,
            "steps": progress.steps,
            "ranks": communicator.size,
            **self._reader.identity(),
            **self._reader.state(communicator, progress.position),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration goes on where `state` was taken; those after it are the epochs that follow."""
        reader, size = self._reader, self._extended.communicator.size
        saved = {name: state.get(name) for name in ("source", "batch_size")}
        here = reader.identity()
        if saved != here:
            raise ValueError(
                f"the state is of another input: it was saved of {saved}, this is {here}"
            )
        if not reader.same_for_any_ranks and state.get("ranks") != size:
            raise ValueError(
                f"the input was saved on {state.get('ranks')} ranks, this is {size}: where each rank reads what it "
                "likes (a dataset function, or AutoShardPolicy.OFF), only as many can go on"
            )
        reader.load_state(self._extended.communicator, state)
        self._epoch, self._start = state["epoch"], state["steps"]
        self._last = self._progress = self._peeked = None

    def read_ahead(self, copies: DeviceCopies) -> int:
        """Steps that are on the way to devices while those before them are computed.

        Collective at first: as many on all ranks, for reading has collectives, even if only some ranks have devices.
        """
        if self._read_ahead is None:
            needed = self._extended.communicator.all_gather_object(
                copies.needed, label="devices of a distributed dataset"
            )
            depth = self._options.experimental_per_replica_buffer_size
            self._read_ahead = depth if any(needed) else 0
        return self._read_ahead

    def _learn_spec(self, batch: Any) -> None:
        """From the first batch of a replica of this rank."""
        reader, extended = self._reader, self._extended
        n = extended.num_replicas_in_sync
        size: int | None = None
        if reader.drop_last and reader.batch_size is not None:
            global_size = reader.batch_size * (n if isinstance(reader, FunctionReader) else 1)
            if _single_worker(extended) and global_size % n == 0:
                size = global_size // n
        spec = nest.map_structure(lambda leaf: leaf.with_batch(size), spec_of(batch))
        if n > 1:
            k = extended.num_local_replicas
            spec = nest.map_structure(lambda leaf: PerReplicaSpec((leaf,) * k), spec)
        self._spec = spec


def distribute(
    dataset: Any, extended: StrategyExtended, options: InputOptions
) -> DistributedDataset:
    """Each replica gets its part of every global batch of `dataset`."""
    if not isinstance(dataset, Iterable):
        raise ValueError(
            "a dataset must be an iterable of batches, such as a torch.utils.data.DataLoader; got "
            f"{dataset!r:.60}"
        )
    share = extended.input.share
    policy = options.experimental_auto_shard_policy
    assert isinstance(policy, AutoShardPolicy)
    if isinstance(dataset, (BatchedDataset, FileDataset)) and policy is not AutoShardPolicy.OFF:
        # Ranks whose files or orders differ would read some examples twice and others never.
        extended.communicator.barrier(label=f"distributed {dataset.summary()}")
    reader = _reader_of(dataset, share, policy, extended.communicator)
    return DistributedDataset(reader, extended, options, extended.input.partial_steps)


def distribute_from_function(
    datasets: list[Any], extended: StrategyExtended, options: InputOptions, *, partial: bool = True
) -> DistributedDataset:
    """Each replica gets batches of what this rank's dataset function made."""
    for dataset in datasets:
        if not isinstance(dataset, Iterable):
            raise ValueError(
                "a dataset function must return a dataset, which must be an iterable of batches; got "
                f"{dataset!r:.60}"
            )
    reader = FunctionReader([beside_mpi(one) for one in datasets], extended.num_local_replicas)
    return DistributedDataset(reader, extended, options, partial and extended.input.partial_steps)


def made_together(communicator: Communicator, make: Callable[[], T]) -> T:
    """What `make` gives; where it fails on one rank, all ranks raise. Collective."""
    made: list[T] = []
    error = None
    try:
        made.append(make())
    except Exception as failed:
        error = failed
    communicator.raise_any(error, "could not make its dataset")
    return made[0]


def _single_worker(extended: StrategyExtended) -> bool:
    return extended.input.share.workers == 1


def _reader_of(
    dataset: Any, share: Share, policy: AutoShardPolicy, communicator: Communicator
) -> Reader:
    if isinstance(dataset, BatchedDataset):
        return IndexReader(dataset, share, policy)
    if isinstance(dataset, FileDataset):
        return FileReader(dataset, share, policy)
    if "torch" in sys.modules:
        from mpistrat.input import torch_loader

        if torch_loader.is_map_style(dataset):
            return torch_loader.LoaderReader(dataset, share, policy, communicator)
    if communicator.size > 1 and policy is not AutoShardPolicy.OFF:
        _warn_of_reading_everything(dataset, communicator)
        return BatchReader(beside_mpi(dataset), share, policy, communicator)
    return BatchReader(beside_mpi(dataset), share, policy)


def beside_mpi(dataset: Any) -> Any:
    """`dataset`; a DataLoader with workers that can live beside MPI."""
    if "torch" in sys.modules:
        from torch.utils.data import DataLoader

        from mpistrat.input.torch_loader import WholeLoader

        return WholeLoader(dataset) if isinstance(dataset, DataLoader) else dataset
    return dataset


def _warn_of_reading_everything(dataset: Any, communicator: Communicator) -> None:
    if communicator.rank == 0:
        warnings.warn(
            f"each of the {communicator.size} ranks reads all batches of this {type(dataset).__name__} and keeps its "
            "part. Cheaper: a DataLoader over a map-style dataset, or mpistrat.input.BatchedDataset (a rank loads only "
            "its own examples), mpistrat.input.FileDataset (a rank reads only its own files), or "
            "distribute_datasets_from_function",
            UserWarning,
            stacklevel=5,
        )
