"""Global batches in, each replica's slice out."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from mpistrat import arrays, nest
from mpistrat.communicators import Communicator
from mpistrat.input.slicing import regroup_batches, slice_bounds

if TYPE_CHECKING:
    from mpistrat.strategy_extended import StrategyExtended


class DistributedDataset(Iterable[Any]):
    """Steps of per-replica batches; made by `strategy.experimental_distribute_dataset`.

    Each iteration over it is an epoch, and every rank must iterate. With one replica per rank a step is
    that replica's batch; with several it is a structure of `PerReplica` batches.
    """

    def __init__(self, dataset: Any, extended: StrategyExtended, per_replica: bool = False) -> None:
        if not isinstance(dataset, Iterable):
            raise ValueError(
                "a dataset must be an iterable of batches, such as a torch.utils.data.DataLoader; got "
                f"{dataset!r:.60}"
            )
        self._dataset = dataset
        self._extended = extended
        self._per_replica = per_replica

    def __iter__(self) -> Iterator[Any]:
        if self._per_replica:
            return self._steps_of_replica_batches()
        if "torch" in sys.modules:
            from mpistrat.input import torch_loader

            if torch_loader.is_map_style(self._dataset):
                return torch_loader.steps(self._dataset, self._extended)
        return self._steps_of_global_batches()

    def _steps_of_replica_batches(self) -> Iterator[Any]:
        """Each step takes one batch for each of this rank's replicas; a step that lacks one is the end."""
        k = self._extended.num_local_replicas
        batches = iter(self._dataset)
        while len(step := [batch for _, batch in zip(range(k), batches, strict=False)]) == k:
            yield regroup_batches(step)

    def _steps_of_global_batches(self) -> Iterator[Any]:
        extended = self._extended
        for number, batch in enumerate(self._dataset):
            size = _global_batch_size(batch)
            if number == 0:
                _check_equal(batch, extended.communicator)
            slices = []
            for i in range(extended.num_local_replicas):
                first, end = slice_bounds(
                    size, extended.first_replica_id + i, extended.num_replicas_in_sync
                )
                slices.append(_slice(batch, first, end))
            yield regroup_batches(slices)


def _check_equal(batch: Any, communicator: Communicator) -> None:
    """ValueError on all ranks unless all have the same first batch: a shuffle of each rank's own shows there.

    Collective. Later batches are not compared; it would cost reading them once more.
    """
    if communicator.size == 1:
        return
    digest = 0
    for leaf in nest.leaves(batch):
        digest = zlib.crc32(arrays.to_numpy(leaf).tobytes(), digest)
    digests = communicator.all_gather_object(digest, label="first batch of the dataset")
    if len(set(digests)) > 1:
        raise ValueError(
            "the ranks read different first batches, so some examples would be read twice and others "
            "never: an iterable must yield the same GLOBAL batches on every rank. Give its shuffle the "
            "same seed everywhere, or pass a torch DataLoader itself (progress bars go around the "
            f"distributed dataset); checksums by rank: {digests[:16]}"
        )


def _slice(batch: Any, first: int, end: int) -> Any:
    return nest.map_structure(lambda leaf: leaf[first:end], batch)


def _global_batch_size(batch: Any) -> int:
    sizes = {_batch_size(leaf) for leaf in nest.leaves(batch)}
    if len(sizes) != 1:
        raise ValueError(
            "all parts of a batch must have the same first dimension, the GLOBAL batch size; got "
            f"{sorted(sizes)}"
        )
    return sizes.pop()


def _batch_size(leaf: Any) -> int:
    if not arrays.is_array(leaf) or leaf.ndim == 0:
        raise ValueError(
            "a dataset must yield batches of arrays whose first dimension is the batch; call batch first. "
            f"Got {leaf!r:.60}"
        )
    return int(leaf.shape[0])
