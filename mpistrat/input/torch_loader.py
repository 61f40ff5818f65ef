"""Re-sharding a `DataLoader` over a map-style dataset through its sampler.

Rank 0 runs the sampler; the indices of each global batch are broadcast, and each rank loads the
examples of its own replicas only. Slicing each rank's own shuffle instead would read some examples
twice and others never.
"""

from __future__ import annotations

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
    """Whether `dataset` is a DataLoader of batches whose examples can be asked for by index."""
    return (
        isinstance(dataset, data.DataLoader)
        and not isinstance(dataset.dataset, data.IterableDataset)
        and dataset.batch_sampler is not None
    )


def global_index_batches(loader: data.DataLoader[Any], extended: StrategyExtended) -> Iterator[Any]:
    """The index lists of an epoch's global batches, as rank 0's sampler gives them."""
    communicator = extended.communicator
    batches = iter(loader.batch_sampler) if communicator.rank == 0 else iter(())  # type: ignore[arg-type]
    while True:
        block = list(itertools.islice(batches, _BATCHES_PER_MESSAGE))
        block = communicator.broadcast_object(block, label="sampler of the distributed dataset")
        yield from block
        if len(block) < _BATCHES_PER_MESSAGE:
            return


def steps(loader: data.DataLoader[Any], extended: StrategyExtended) -> Iterator[Any]:
    """One epoch: for each global batch this rank's slice, or slices, collated by the loader's function."""
    batches = list(global_index_batches(loader, extended))
    k = extended.num_local_replicas
    bounds = [
        slice_bounds(len(batch), extended.first_replica_id + i, extended.num_replicas_in_sync)
        for batch in batches
        for i in range(k)
    ]
    slices = [
        batch[first:end]
        for batch, (first, end) in zip(
            itertools.chain.from_iterable([batch] * k for batch in batches), bounds, strict=True
        )
    ]
    # Workers are given the slices that hold examples; an empty one is an empty batch of the same kind.
    loaded = iter(_loader_of(loader, [indices for indices in slices if indices]))
    template: Any = None
    for step in range(len(batches)):
        parts = []
        for indices in slices[step * k : (step + 1) * k]:
            if indices:
                template = next(loaded)
                parts.append(template)
            else:
                if template is None:
                    template = loader.collate_fn([loader.dataset[batches[step][0]]])
                parts.append(nest.map_structure(lambda leaf: leaf[:0], template))
        yield regroup_batches(parts)


def _loader_of(loader: data.DataLoader[Any], batches: list[Any]) -> data.DataLoader[Any]:
    """A DataLoader like `loader` that reads just `batches`."""
    return data.DataLoader(
        loader.dataset,
        batch_sampler=batches,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
    )
