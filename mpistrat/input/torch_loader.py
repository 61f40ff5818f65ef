"""Re-sharding a `DataLoader` over a map-style dataset through its sampler.

Rank 0 runs the sampler; the indices of each global batch are broadcast, and each rank loads the
examples of its own replicas only. Slicing each rank's own shuffle instead would read some examples
twice and others never.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, TypeGuard, cast

import torch.utils.data as data

from mpistrat.communicators import Communicator
from mpistrat.input.random_state import RandomState, samplers_of
from mpistrat.input.readers import (
    EMPTY,
    MISSING,
    Reader,
    Step,
    StepAt,
    reads_all,
    steps_of_indices,
)
from mpistrat.input.splitting import Share
from mpistrat.input.worker_processes import starting_workers, worker_context
from mpistrat.options import AutoShardPolicy

# Ranks wait for the slowest of them at each message: few are sent. Rank 0's sampler runs ahead by as much.
_BATCHES_OF_FIRST_MESSAGE, _BATCHES_OF_LONGEST = 256, 4096


def is_map_style(dataset: Any) -> TypeGuard[data.DataLoader[Any]]:
    """Whether `dataset` is a DataLoader of batches whose examples can be asked for by index.

    Raises:
        ValueError: its sampler already takes one rank's share.
    """
    if not isinstance(dataset, data.DataLoader) or dataset.batch_sampler is None:
        return False
    for sampler in samplers_of(dataset):
        if isinstance(sampler, data.DistributedSampler):
            raise ValueError(
                "the DataLoader has a DistributedSampler, which gives each rank a share of the examples; "
                "here the loader yields GLOBAL batches and the strategy shares them out. Use "
                "DataLoader(dataset, batch_size=GLOBAL, shuffle=True)"
            )
    return not isinstance(dataset.dataset, data.IterableDataset)


def beside_mpi(dataset: Iterable[Any]) -> Iterable[Any]:
    """`dataset` itself; of a DataLoader with workers one whose workers can live beside MPI."""
    if not isinstance(dataset, data.DataLoader) or not dataset.num_workers:
        return dataset
    if dataset.multiprocessing_context is not None:
        return dataset
    if isinstance(dataset.dataset, data.IterableDataset):
        how: dict[str, Any] = {"batch_size": dataset.batch_size, "drop_last": dataset.drop_last}
    elif dataset.batch_sampler is None:
        how = {"batch_size": None, "sampler": dataset.sampler}
    else:
        how = {"batch_sampler": dataset.batch_sampler}
    return _like(dataset, **how)


def _like(loader: data.DataLoader[Any], **how: Any) -> data.DataLoader[Any]:
    """A DataLoader of the same dataset, workers and random numbers."""
    return data.DataLoader(
        loader.dataset,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=worker_context(loader),
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        **how,
    )


class _Pieces:
    """A batch sampler: the indices of this rank's pieces, in turn, of the epoch that was begun last.

    A piece without examples is given as `some` example, so that every rank's loader asks for as many pieces at the
    same times; `kinds` says which those are.
    """

    def __init__(self) -> None:
        self.kinds: collections.deque[Any] = collections.deque()
        self.some: list[int] = []
        self._steps: Iterator[list[list[int] | None]] = iter(())

    def begin(self, steps: Iterator[list[list[int] | None]]) -> None:
        self.kinds.clear()
        # The first is taken now: samplers draw their seed then.
        self._steps = itertools.chain(list(itertools.islice(steps, 1)), steps)

    def __iter__(self) -> Iterator[list[int]]:
        for step in self._steps:
            for piece in step:
                self.kinds.append(True if piece else EMPTY if piece is not None else MISSING)
                yield piece or self.some


class LoaderReader(Reader):
    """Of a DataLoader over a map-style dataset."""

    def __init__(
        self,
        loader: data.DataLoader[Any],
        share: Share,
        policy: AutoShardPolicy,
        communicator: Communicator,
    ) -> None:
        self._user = loader
        self._share, self._policy = share, policy
        self._communicator = communicator
        self._loader: data.DataLoader[Any] | None = None
        self._template: Any = None
        self._random = RandomState(loader)
        sizes = loader.batch_size, getattr(loader.batch_sampler, "batch_size", None)
        self.batch_size = next((size for size in sizes if isinstance(size, int)), None)
        self.drop_last = bool(getattr(loader.batch_sampler, "drop_last", False))
        self.same_for_any_ranks = self.ends_together = not reads_all(share, policy)
        steps_of_indices((), share, policy, self.batch_size)  # raises for what cannot be

    def steps(self, epoch: int, start: int) -> Iterator[Step]:
        """One epoch: of each global batch this rank's pieces, collated by the loader's function."""
        for sampler in samplers_of(self._user):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        if self._loader is None or not self._user.persistent_workers:
            self._loader = _like(self._user, batch_sampler=_Pieces())
        loader, pieces = self._loader, cast("_Pieces", self._loader.batch_sampler)
        indices = steps_of_indices(
            self._index_batches(pieces), self._share, self._policy, self.batch_size
        )
        with self._random.of_epoch():
            pieces.begin(itertools.islice(indices, start, None))
            with starting_workers(self._user):
                batches = iter(loader)
        began = self._random.began
        k = len(self._share.replicas)
        while len(step := list(itertools.islice(batches, k))) == k:
            self._template = step[0]
            kinds = [pieces.kinds.popleft() for _ in step]
            entries = zip(step, kinds, strict=True)
            yield StepAt(began, (batch if kind is True else kind for batch, kind in entries))

    def _index_batches(self, pieces: _Pieces) -> Iterator[list[int]]:
        """The index lists of the global batches, as rank 0's sampler gives them; `pieces` learns of some example."""
        communicator = self._communicator
        batches = iter(self._user.batch_sampler)  # type: ignore[arg-type]
        if reads_all(self._share, self._policy):
            for batch in map(list, batches):
                pieces.some = pieces.some or batch[:1]
                yield batch
            return
        if communicator.rank != 0:
            # A sampler draws its seed from the rank's generator: the ranks' generators stay in step.
            next(batches, None)
        length = _BATCHES_OF_FIRST_MESSAGE
        while True:
            block: list[list[int]] = []
            with communicator.raising_together():
                if communicator.rank == 0:
                    block = [list(batch) for batch in itertools.islice(batches, length)]
            block = communicator.broadcast_object(block, label="sampler of the distributed dataset")
            pieces.some = pieces.some or next((batch[:1] for batch in block if batch), [])
            yield from block
            if len(block) < length:
                return
            length = min(2 * length, _BATCHES_OF_LONGEST)

    def cardinality(self) -> int:
        try:
            return len(self._user)
        except TypeError:
            return super().cardinality()

    def template(self) -> Any:
        return self._template

    def state(self, communicator: Communicator, position: Any) -> dict[str, Any]:
        """The order of the epoch: what rank 0's random numbers were, or will be, when it begins."""
        random = self._random.now() if position is None else position
        return {"random": communicator.broadcast_object(random, label="state of the sampler")}

    def load_state(self, state: dict[str, Any]) -> None:
        self._random.begin_at(state["random"])
