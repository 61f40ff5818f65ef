"""The work of `experimental_distribute_dataset` and similar methods: they choose a reader for the dataset."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from typing import Any, cast

from mpistrat.communicators import Communicator
from mpistrat.input import readers
from mpistrat.input.datasets import BatchedDataset, FileDataset
from mpistrat.input.distributed_dataset import DistributedDataset
from mpistrat.input.file_reader import FileReader
from mpistrat.input.readers import BatchReader, FunctionReader, IndexReader, Reader
from mpistrat.input.splitting import ReplicaPieces
from mpistrat.machine.notices import tell, warn_on_first_rank
from mpistrat.options import AutoShardPolicy, InputOptions
from mpistrat.replicas.input_plan import Share
from mpistrat.replicas.strategy_extended import StrategyExtended


def distribute(
    dataset: Any, extended: StrategyExtended, options: InputOptions
) -> DistributedDataset:
    """Return a dataset that gives each replica its piece of every global batch of `dataset`.

    Called by: every rank, for `experimental_distribute_dataset` and `prepare`.
    Raises:
        ValueError: `dataset` is not iterable.
        CollectiveMismatchError: on all ranks, if their `BatchedDataset` or `FileDataset` differ in their `summary`.
        InvalidArgumentError, NotFoundError: the reader cannot follow the auto-shard policy.
    """
    if not isinstance(dataset, Iterable):
        raise ValueError(
            "a dataset must be an iterable of batches, such as a torch.utils.data.DataLoader; got "
            f"{dataset!r:.60}"
        )
    share = extended.input.share
    policy = cast("AutoShardPolicy", options.experimental_auto_shard_policy)
    if isinstance(dataset, (BatchedDataset, FileDataset)) and policy is not AutoShardPolicy.OFF:
        # If files or orders differed between ranks, the ranks would read some examples twice and others never.
        extended.communicator.barrier(label=f"distributed {dataset.summary()}")
    ahead = options.experimental_per_replica_buffer_size
    reader = _reader_of(dataset, share, policy, extended.communicator, ahead)
    return DistributedDataset(reader, extended, options, dataset, extended.input.partial_steps)


def distribute_from_function(
    datasets: list[Any], extended: StrategyExtended, options: InputOptions, *, partial: bool = True
) -> DistributedDataset:
    """Return a dataset that gives this rank's replicas the batches of a dataset function. Called by: every rank.

    Args:
        datasets: the function's results on this rank: one for each replica, or one for all. The replicas then take
            batches of it in turn.
        partial: whether an epoch may go on as long as any replica has data. The strategy must allow it, too.
    Raises: ValueError if a result is not iterable.
    """
    number = extended.input.share.pieces[0]
    safe = []
    for dataset in datasets:
        if not isinstance(dataset, Iterable):
            raise ValueError(
                "a dataset function must return a dataset, which must be an iterable of batches; got "
                f"{dataset!r:.60}"
            )
        safe.append(safe_dataset(dataset, seed_id=number))
    reader = FunctionReader(safe, extended.num_local_replicas)
    partial = partial and extended.input.partial_steps
    return DistributedDataset(reader, extended, options, datasets[0], partial)


def distribute_local(batches: Any, extended: StrategyExtended) -> DistributedDataset:
    """Return a dataset for `local_batches=True`: this rank's replicas take the items of `batches` in turn.

    An epoch ends with the rank that has the fewest batches. Called by: every rank.
    """
    safe = safe_dataset(batches, seed_id=extended.input.share.pieces[0])
    reader = LocalReader(safe, extended.num_local_replicas, extended.communicator)
    return DistributedDataset(reader, extended, InputOptions(), batches, partial=False)


def _reader_of(
    dataset: Any, share: Share, policy: AutoShardPolicy, communicator: Communicator, ahead: int
) -> Reader:
    if isinstance(dataset, BatchedDataset):
        return IndexReader(dataset, share, policy)
    if isinstance(dataset, FileDataset):
        return FileReader(dataset, share, policy)
    if "torch" in sys.modules:
        from mpistrat.input import torch_loader

        if torch_loader.is_map_style(dataset):
            return torch_loader.LoaderReader(dataset, share, policy, communicator, ahead)
    if communicator.size > 1 and policy is not AutoShardPolicy.OFF:
        warn_on_first_rank(
            communicator.rank,
            f"each of the {communicator.size} ranks reads all batches of this {type(dataset).__name__} and keeps its "
            "part. Cheaper: a DataLoader over a map-style dataset, or mpistrat.input.BatchedDataset (a rank loads only "
            "its own examples), mpistrat.input.FileDataset (a rank reads only its own files), or "
            "distribute_datasets_from_function",
            UserWarning,
            stacklevel=4,
        )
        return BatchReader(safe_dataset(dataset, communicator), share, policy, communicator)
    number = share.pieces[0] if policy is AutoShardPolicy.OFF else 0
    return BatchReader(safe_dataset(dataset, seed_id=number), share, policy)


def safe_dataset(dataset: Any, whole_on: Communicator | None = None, seed_id: int = 0) -> Any:
    """Return `dataset`; for a torch DataLoader, a `WholeLoader` of it, because MPI does not bear forks.

    Args: whole_on, seed_id: the arguments of `WholeLoader`.
    """
    if "torch" in sys.modules:
        from torch.utils.data import DataLoader

        from mpistrat.input.torch_loader import WholeLoader

        if isinstance(dataset, DataLoader):
            return WholeLoader(dataset, whole_on, seed_id)
    return dataset


class LocalReader(readers.FunctionReader):
    """Reads an iterable that gives this rank's part of the data. The epoch ends with the shortest rank's iterable.

    Made by: every rank. The ranks tell each other their numbers of steps. If one rank does not know its number, the
        ranks ask each other at each step.
    Raises: ValueError if some ranks have no data for a step, and others have.
    """

    def __init__(
        self, batches: Iterable[Any], num_replicas: int, communicator: Communicator
    ) -> None:
        super().__init__([batches], num_replicas)
        length = readers.length_of(batches)
        steps = None if length == readers.UNKNOWN_CARDINALITY else length // num_replicas
        self._rank = communicator.rank
        self._has_spoken = False
        by_rank = communicator.all_gather_object(steps, label="steps of local batches")
        self._steps: int | None = None
        if None not in by_rank:
            self._steps = min(by_rank)
            self.steps_agreed = True
            readers.check_all_have_some(by_rank)
            self._tell(by_rank, f", {self._steps} steps", "rank {}: {}")

    def steps(self, epoch: int, start: int) -> Iterator[ReplicaPieces]:
        steps = super().steps(epoch, start)
        if self._steps is None:
            return steps
        return itertools.islice(steps, self._steps - start)

    def num_steps(self) -> int | None:
        return self._steps

    def end(self, communicator: Communicator, has_more: bool) -> None:
        if not self._has_spoken:
            by_rank = communicator.all_gather_object(has_more, label="end of local batches")
            self._tell(by_rank, "", "rank {}")

    def _tell(self, amounts: list[Any], steps: str, name: str) -> None:
        """Let rank 0 name the ranks that have more data than the shortest rank, and so do not use all of their data.

        Args:
            amounts: for each rank, its number of steps, or whether it has a further step.
            steps: text about the number of steps; "" if the number is not known.
            name: a format string for a rank and its amount.
        """
        least = min(amounts)
        longer = []
        for rank, amount in enumerate(amounts):
            if amount > least:
                longer.append(name.format(rank, amount))
        self._has_spoken = bool(longer)
        if longer and self._rank == 0:
            if len(longer) > 16:
                longer[16:] = ["…"]
            tell(
                f"local batches end with the shortest rank{steps}: further batches of other ranks are left out in each "
                f"epoch ({', '.join(longer)})"
            )
