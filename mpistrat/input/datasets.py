"""Datasets that know how their batches are made, so that a rank reads no more than its share."""

from __future__ import annotations

import operator
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mpistrat import arrays, nest
from mpistrat.input.batches import Batches, collate
from mpistrat.input.splitting import pieces_of_examples


class _Batching:
    """How a dataset makes batches of examples, in each epoch in an order of its own.

    Attributes:
        epoch: the number of the next iteration.
        program_collate: the program's function; None for `batches.collate`.
    """

    def __init__(
        self,
        batch_size: int,
        drop_last: bool,
        shuffle: bool,
        seed: int,
        collate_fn: Callable[[list[Any]], Any] | None,
    ) -> None:
        if isinstance(batch_size, bool) or operator.index(batch_size) < 1:
            raise ValueError(f"batch_size must be a positive integer, got {batch_size!r:.60}")
        self.batch_size = operator.index(batch_size)
        self.drop_last = drop_last
        self.program_collate, self.collate = collate_fn, collate_fn or collate
        self.epoch = 0
        self._shuffle, self._seed = shuffle, operator.index(seed)

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is that epoch."""
        self.epoch = epoch

    def _order_of(self, number: int, epoch: int) -> npt.NDArray[np.int64]:
        """The order in which an epoch reads so many things: an array of their indices."""
        order = np.arange(number)
        if self._shuffle:
            np.random.default_rng([self._seed, epoch]).shuffle(order)
        return order

    def _summary(self, contents: str) -> str:
        return (
            f"{contents}, batch_size={self.batch_size}, drop_last={self.drop_last}, shuffle={self._shuffle}, "
            f"seed={self._seed}{', collate_fn' * bool(self.program_collate)})"
        )


class BatchedDataset(_Batching):
    """GLOBAL batches of arrays, or of a map-style dataset, without torch.

    Iterating over it gives an epoch of whole batches; given to `experimental_distribute_dataset`, each rank reads only
    the examples of its own replicas.

    Args:
        dataset: an array, or a tuple or dict of arrays with equal first dimensions; or an object with `__len__` and
            `__getitem__` (also one with `__getitems__`, which is given the indices of a batch). A strategy asks the
            object on a thread of its own: draw random numbers from a generator of its own, too.
        batch_size: examples in a GLOBAL batch.
        drop_last: leave out a last batch that is short.
        shuffle: a new order in each epoch, the same on all ranks: of `numpy.random.default_rng([seed, epoch])`.
        collate_fn: makes a batch of a list of examples; None stacks them. Unused for arrays.
    Raises:
        TypeError, ValueError: arguments that are not as above.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        drop_last: bool = False,
        shuffle: bool = False,
        seed: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.of_arrays = nest.is_structure(dataset) or arrays.is_array(dataset)
        program_collate = None if self.of_arrays else collate_fn
        super().__init__(batch_size, drop_last, shuffle, seed, program_collate)
        self._dataset = dataset
        if isinstance(dataset, list):
            raise TypeError(
                "BatchedDataset got a list: of examples, or of arrays? Give arrays as a tuple or dict of them, and a "
                "list of examples to torch's DataLoader, or as an object with __len__ and __getitem__"
            )
        if self.of_arrays:
            self.collate = _as_it_is
            self.examples = Batches().size(dataset)
        elif hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
            self.examples = len(dataset)
        else:
            raise TypeError(
                "BatchedDataset takes arrays, or a dataset with __len__ and __getitem__; got "
                f"{type(dataset).__name__}"
            )

    def summary(self) -> str:
        """What must be the same on all ranks."""
        return self._summary(f"BatchedDataset({self.examples} examples")

    def __len__(self) -> int:
        """Batches in an epoch."""
        whole, rest = divmod(self.examples, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Any]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        return map(self.collate, map(self.fetch, self.index_batches(epoch)))

    def index_batches(self, epoch: int) -> Iterator[list[int]]:
        """The examples of each batch of an epoch."""
        order = self._order_of(self.examples, epoch)
        for first in range(0, len(self) * self.batch_size, self.batch_size):
            yield order[first : first + self.batch_size].tolist()

    def fetch(self, indices: list[int]) -> Any:
        """The examples `indices`, one or more, of which `collate` makes a batch."""
        if self.of_arrays:
            # Consecutive examples are not copied.
            span = range(indices[0], indices[-1] + 1)
            where: Any = slice(span.start, span.stop) if indices == [*span] else indices
            return nest.map_structure(operator.itemgetter(where), self._dataset)
        return fetch(self._dataset, indices)


class FileDataset(_Batching):
    """GLOBAL batches of the examples in files.

    Iterating over it gives an epoch of whole batches. Given to `experimental_distribute_dataset`, each worker reads
    every n-th file (AutoShardPolicy.AUTO and FILE) or everything (DATA, OFF).

    Args:
        files: what names the files, such as their paths; sort what comes from a directory.
        reader: `reader(file)` gives the examples of a file, one after the other. It runs on a thread of its own: draw
            random numbers from a generator of its own, too.
        batch_size: examples in a GLOBAL batch.
        drop_last: leave out what does not fill a batch at the end.
        shuffle: another order of the files in each epoch, the same on all ranks: of
            `numpy.random.default_rng([seed, epoch])`.
        collate_fn: makes a batch of a list of examples; None stacks them.
    """

    def __init__(
        self,
        files: Sequence[Any],
        reader: Callable[[Any], Iterable[Any]],
        batch_size: int,
        *,
        drop_last: bool = False,
        shuffle: bool = False,
        seed: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        if isinstance(files, (str, bytes)) or not isinstance(files, Sequence):
            raise TypeError(f"files must be a sequence of files, got {files!r:.60}")
        if not callable(reader):
            raise TypeError(f"reader must be a function of a file, got {reader!r:.60}")
        self.files = list(files)
        self.reader = reader
        super().__init__(batch_size, drop_last, shuffle, seed, collate_fn)

    def summary(self) -> str:
        """What must be the same on all ranks: not the folders, which may be each node's own."""
        names = "\n".join(os.path.basename(str(file)) for file in self.files)
        checksum = f"checksum of their names {zlib.crc32(names.encode()):08x}"
        return self._summary(f"FileDataset({len(self.files)} files, {checksum}")

    def order(self, epoch: int) -> list[int]:
        """The numbers of the files, in the order in which an epoch reads them."""
        return self._order_of(len(self.files), epoch).tolist()

    def __iter__(self) -> Iterator[Any]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        examples = (example for i in self.order(epoch) for example in self.reader(self.files[i]))
        batches = pieces_of_examples(examples, [self.batch_size], drop_last=self.drop_last)
        return map(self.collate, batches)


def _as_it_is(batch: Any) -> Any:
    """The parts of arrays are a batch already."""
    return batch


def fetch(dataset: Any, indices: list[Any]) -> list[Any]:
    """The examples of a map-style dataset, at once if it can give several, as a DataLoader asks for them."""
    if getattr(dataset, "__getitems__", None):
        return dataset.__getitems__(indices)
    return [dataset[index] for index in indices]
