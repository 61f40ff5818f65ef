"""Re-sharding a `DataLoader` over a map-style dataset through its sampler.

Rank 0 runs the sampler; the indices of each global batch are broadcast, and each rank loads the
examples of its own replicas only. Slicing each rank's own shuffle instead would read some examples
twice and others never.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeGuard

import torch.utils.data as data

from mpistrat import nest
from mpistrat.input.slicing import regroup_batches, slice_bounds

if TYPE_CHECKING:
    from mpistrat.strategy_extended import StrategyExtended

_BATCHES_PER_MESSAGE = 64


def is_map_style(dataset: Any) -> TypeGuard[data.DataLoader[Any]]:
    """Whether `dataset` is a DataLoader of batches whose examples can be asked for by index.

    Raises:
        ValueError: its sampler already takes one rank's share.
    """
    if not isinstance(dataset, data.DataLoader) or dataset.batch_sampler is None:
        return False
    for sampler in (dataset.sampler, dataset.batch_sampler):
        if isinstance(sampler, data.DistributedSampler):
            raise ValueError(
                "the DataLoader has a DistributedSampler, which gives each rank a share of the examples; "
                "here the loader yields GLOBAL batches and the strategy shares them out. Use "
                "DataLoader(dataset, batch_size=GLOBAL, shuffle=True)"
            )
    return not isinstance(dataset.dataset, data.IterableDataset)


class _ShardedIndices:
    """A batch sampler: of each global batch the slices of this rank's replicas, in turn.

    A slice without examples is given as the batch's first example, so that every rank's loader asks for
    as many batches at the same times; `is_empty` says which those are.
    """

    def __init__(self, loader: data.DataLoader[Any], extended: StrategyExtended) -> None:
        self._loader = loader
        self._extended = extended
        self.is_empty: collections.deque[bool] = collections.deque()

    def __iter__(self) -> Iterator[list[int]]:
        extended = self._extended
        first_id, replicas = extended.first_replica_id, extended.num_replicas_in_sync
        for batch in self._global_batches():
            for i in range(first_id, first_id + extended.num_local_replicas):
                first, end = slice_bounds(len(batch), i, replicas)
                self.is_empty.append(first == end)
                yield batch[first:end] if first < end else batch[:1]

    def _global_batches(self) -> Iterator[list[int]]:
        """The index lists of the global batches, as rank 0's sampler gives them."""
        communicator = self._extended.communicator
        batches = iter(self._loader.batch_sampler)  # type: ignore[arg-type]
        if communicator.rank != 0:
            # A sampler draws its seed from the rank's generator: the ranks' generators stay in step.
            next(batches, None)
        while True:
            block: list[list[int]] = []
            with communicator.raising_together():
                if communicator.rank == 0:
                    block = list(itertools.islice(batches, _BATCHES_PER_MESSAGE))
            block = communicator.broadcast_object(block, label="sampler of the distributed dataset")
            yield from block
            if len(block) < _BATCHES_PER_MESSAGE:
                return


def steps(loader: data.DataLoader[Any], extended: StrategyExtended) -> Iterator[Any]:
    """One epoch: for each global batch this rank's slice, or slices, collated by the loader's function."""
    indices = _ShardedIndices(loader, extended)
    batches = iter(_loader_of(loader, indices))
    k = extended.num_local_replicas
    while len(step := list(itertools.islice(batches, k))) == k:
        yield regroup_batches(
            [_without_examples(batch) if indices.is_empty.popleft() else batch for batch in step]
        )


def _without_examples(batch: Any) -> Any:
    return nest.map_structure(lambda leaf: leaf[:0], batch)


def _loader_of(loader: data.DataLoader[Any], indices: _ShardedIndices) -> data.DataLoader[Any]:
    """A DataLoader like `loader` that reads just `indices`."""
    return data.DataLoader(
        loader.dataset,
        batch_sampler=indices,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
    )
