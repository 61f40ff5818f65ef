"""What `experimental_distribute_dataset` and `distribute_datasets_from_function` return."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from mpistrat.communicators import Communicator
from mpistrat.input.datasets import BatchedDataset, FileDataset
from mpistrat.input.distributed_iterator import DistributedIterator, element_spec_of
from mpistrat.input.file_reader import FileReader
from mpistrat.input.local_batches import LocalReader
from mpistrat.input.readers import BatchReader, FunctionReader, IndexReader, Reader
from mpistrat.input.step_source import IteratorProgress, StepSource
from mpistrat.options import AutoShardPolicy, InputOptions
from mpistrat.pytorch.compilation import not_compiled
from mpistrat.replicas.input_plan import Share
from mpistrat.trace import spans

if TYPE_CHECKING:
    from mpistrat.replicas.strategy_extended import StrategyExtended


class DistributedDataset(Iterable[Any]):
    """Steps of per-replica batches; made by a strategy.

    Each iteration over it is an epoch, and every rank must iterate. With one replica per rank a step is
    that replica's batch; with several it is a structure of `PerReplica` batches.

    What else a program asks of it, it asks of what is distributed: of a DataLoader `dataset`, `batch_size` (of the
    global batch, or with `local_batches` of a replica's), `sampler`, `batch_sampler`, `drop_last`, `num_workers`,
    `collate_fn`, and what its class has of its own.

    Attributes:
        after_steps: methods that are called inside `Strategy.replica()`, on every rank, when the program has done with
            a step: it asks for what comes after. The state of the dataset is then that after the step.
        partial: a step is made as long as any replica of any rank has data, the others get batches of no examples.
            Otherwise a step that cannot fill every replica of this rank ends the epoch.
    """

    def __init__(self, source: StepSource, distributed: Any) -> None:
        self._source, self._distributed = source, distributed
        self.after_steps = source.after_steps

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        distributed = self._distributed
        kind = type(distributed)
        if kind.__module__ != "builtins" and hasattr(distributed, name):
            return getattr(distributed, name)
        raise AttributeError(
            f"a DistributedDataset has no {name!r}, and neither has the {kind.__name__} that it distributes"
        )

    @property
    def strategy(self) -> Any:
        """Whose replicas it gives batches to."""
        return self._source.extended.strategy

    @property
    def partial(self) -> bool:
        return self._source.partial

    @not_compiled
    def __iter__(self) -> DistributedIterator:
        source = self._source
        iterator: DistributedIterator = source.peeked or DistributedIterator(source)
        source.has_begun(iterator, iterator.progress)
        return iterator

    def __len__(self) -> int:
        """Steps of an epoch. Raises: TypeError when that is not known before it ends."""
        steps = self._source.reader.num_steps()
        if steps is None and self._source.reader.ends_together and self.cardinality >= 0:
            steps = self.cardinality
        if steps is None:
            raise TypeError("the number of steps of this distributed dataset is not known")
        return steps

    @property
    def cardinality(self) -> int:
        """Global batches of an epoch; -1: they never end, -2: it is not known before."""
        return self._source.reader.cardinality()

    @property
    def element_spec(self) -> Any:
        """The structure of a step, with an ArraySpec (PerReplicaSpec with more than one replica) for each array.

        Reads the first batch, where none was read yet. Called by: every rank.
        """
        return element_spec_of(self._source)

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """`reduce_func(state, step)` over the steps of an epoch."""
        state = initial_state
        for step in self:
            state = reduce_func(state, step)
        return state

    def state_dict(self) -> dict[str, Any]:
        """Where the iteration that was begun last stands; see `DistributedIterator.state_dict`."""
        with spans.current.range("dataset.state_dict"):
            source = self._source
            progress = source.peeked.progress if source.peeked else source.progress
            return source.state_at(progress or IteratorProgress(source.epoch, source.start))

    def state_schema(self, state: dict[str, Any]) -> dict[str, Any]:
        """What a state looks like: see `checkpoint.schema`. Not collective."""
        return self._source.state_schema(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration goes on where `state` was taken; those after it are the epochs that follow."""
        self._source.load_state_dict(state)


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
    source = StepSource(reader, extended, options, extended.input.partial_steps)
    return DistributedDataset(source, dataset)


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
    number = extended.input.share.pieces[0]
    safe = [with_safe_workers(dataset, reader=number) for dataset in datasets]
    reader = FunctionReader(safe, extended.num_local_replicas)
    source = StepSource(reader, extended, options, partial and extended.input.partial_steps)
    return DistributedDataset(source, datasets[0])


def distribute_local(batches: Any, extended: StrategyExtended) -> DistributedDataset:
    """The replicas of this rank get the batches of this rank's `batches`, in turn. Called by: every rank."""
    safe = with_safe_workers(batches, reader=extended.input.share.pieces[0])
    reader = LocalReader(safe, extended.num_local_replicas, extended.communicator)
    return DistributedDataset(StepSource(reader, extended, InputOptions(), partial=False), batches)


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
        return BatchReader(with_safe_workers(dataset, communicator), share, policy, communicator)
    number = share.pieces[0] if policy is AutoShardPolicy.OFF else 0
    return BatchReader(with_safe_workers(dataset, reader=number), share, policy)


def with_safe_workers(dataset: Any, whole_on: Communicator | None = None, reader: int = 0) -> Any:
    """`dataset`; a DataLoader with workers that can live beside MPI. `whole_on`, `reader`: as of `WholeLoader`."""
    if "torch" in sys.modules:
        from torch.utils.data import DataLoader

        from mpistrat.input.torch_loader import WholeLoader

        if isinstance(dataset, DataLoader):
            return WholeLoader(dataset, whole_on, reader)
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
