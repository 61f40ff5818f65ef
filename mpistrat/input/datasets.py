"""Datasets that know how their batches are made, so that a rank reads only its share."""

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
from mpistrat.input.splitting import joined, pieces_of_examples


class _Batching:
    """How a dataset makes batches of examples; with `shuffle=True`, in another order in each epoch.

    Attributes:
        epoch: number of the epoch that the next iteration reads.
        program_collate: the program's `collate_fn`; None if batches are made by `batches.collate`.
    """

    def __init__(
        self,
        batch_size: int,
        drop_last: bool,
        shuffle: bool,
        seed: int,
        collate_fn: Callable[[list[Any]], Any] | None,
    ) -> None:
        self.batch_size = operator.index(batch_size)
        if isinstance(batch_size, bool) or self.batch_size < 1:
            raise ValueError(f"batch_size must be a positive integer, got {batch_size!r:.60}")
        self.drop_last = drop_last
        self.program_collate = collate_fn
        self.collate = collate_fn or collate
        self.epoch = 0
        self._shuffle = shuffle
        self._seed = operator.index(seed)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration read epoch number `epoch`.

        Example:
            >>> dataset = ms.input.BatchedDataset(np.arange(4), batch_size=4, shuffle=True)
            >>> dataset.set_epoch(3)
            >>> list(dataset)
            [array([2, 1, 0, 3])]
        """
        self.epoch = epoch

    def _order_of(self, number: int, epoch: int) -> npt.NDArray[np.int64]:
        """Return the int64 indices 0 to `number` - 1 in the epoch's order, by seed and epoch if there is `shuffle`."""
        order = np.arange(number)
        if self._shuffle:
            np.random.default_rng([self._seed, epoch]).shuffle(order)
        return order

    def _summary(self, contents: str) -> str:
        text = (
            f"{contents}, batch_size={self.batch_size}, drop_last={self.drop_last}, shuffle={self._shuffle}, "
            f"seed={self._seed}"
        )
        if self.program_collate:
            text += ", collate_fn"
        return f"{text})"


class BatchedDataset(_Batching):
    """GLOBAL batches of arrays, or of a map-style dataset, without torch.

    Iterating over the dataset gives one epoch of whole batches. Given to `experimental_distribute_dataset`, each rank
    reads only the examples of its own replicas.

    Args:
        dataset: an array; or a tuple or dict of arrays with equal first dimensions; or an object with `__len__` and
            `__getitem__`. An object with `__getitems__` gets the indices of a whole batch. A strategy reads such an
            object on another thread, so let the object draw random numbers from a generator of its own.
        batch_size: number of examples in a GLOBAL batch.
        drop_last: leave out the last batch if it is short.
        shuffle: read in a new order in each epoch, by `numpy.random.default_rng([seed, epoch])`, the same on all ranks.
        collate_fn: makes a batch of a list of examples; None stacks them. Unused for arrays.
    Raises:
        TypeError: `dataset` is a list, or of none of these kinds; or `batch_size` or `seed` is not an integer.
        ValueError: `batch_size` is not positive, or arrays differ in their first dimension.

    Example:
        >>> dataset = ms.input.BatchedDataset(np.arange(10), batch_size=4)
        >>> list(dataset)
        [array([0, 1, 2, 3]), array([4, 5, 6, 7]), array([8, 9])]
        >>> list(dataset.index_batches(epoch=0))
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
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
        """Describe the dataset in a text that must be equal on all ranks: its size and the arguments of its batches.

        Example:
            >>> ms.input.BatchedDataset(np.zeros((100, 2)), 32).summary()
            'BatchedDataset(100 examples, batch_size=32, drop_last=False, shuffle=False, seed=0)'
        """
        return self._summary(f"BatchedDataset({self.examples} examples")

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        whole, rest = divmod(self.examples, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Any]:
        batches = self.index_batches(self.epoch)
        self.epoch += 1
        return (self.collate(self.fetch(batch)) for batch in batches)

    def index_batches(self, epoch: int) -> Iterator[list[int]]:
        """Yield the indices of the examples of each batch of an epoch, as lists of int."""
        order = self._order_of(self.examples, epoch)
        for first in range(0, len(self) * self.batch_size, self.batch_size):
            yield order[first : first + self.batch_size].tolist()

    def fetch(self, indices: list[int]) -> Any:
        """Return the examples at `indices`, at least one, in the form that `collate` makes a batch of.

        Returns: for arrays, the nest with the rows at `indices` (views if the indices are consecutive); otherwise a
            list of examples.

        Example:
            >>> dataset = ms.input.BatchedDataset({"x": np.arange(10)}, batch_size=4)
            >>> dataset.fetch([0, 9])
            {'x': array([0, 9])}
        """
        if self.of_arrays:
            # A slice gives views, so consecutive examples are not copied.
            where: Any = indices
            span = range(indices[0], indices[-1] + 1)
            if indices == list(span):
                where = slice(span.start, span.stop)

            def rows(array: Any) -> Any:
                return array[where]

            return nest.map_structure(rows, self._dataset)
        return fetch(self._dataset, indices)


class FileDataset(_Batching):
    """GLOBAL batches of the examples in files.

    Iterating over the dataset gives one epoch of whole batches. Given to `experimental_distribute_dataset`, each worker
    reads every n-th file (AutoShardPolicy.AUTO and FILE) or all files (DATA and OFF).

    Args:
        files: a sequence of the files' names or paths, in the same order on all ranks: sort a directory's list.
        reader: `reader(file)` returns an iterable of the file's examples. A strategy calls it on another thread, so let
            it draw random numbers from a generator of its own.
        batch_size: number of examples in a GLOBAL batch.
        drop_last: leave out the last examples of an epoch if they do not fill a batch.
        shuffle: read the files in a new order in each epoch, by `numpy.random.default_rng([seed, epoch])`, the same on
            all ranks.
        collate_fn: makes a batch of a list of examples; None stacks them.
    Raises:
        TypeError: `files` is a text or no sequence, `reader` cannot be called, or a number is not an integer.
        ValueError: `batch_size` is not positive.

    Example:
        >>> for name in "ab":
        ...     np.save(f"{name}.npy", np.arange(3))
        >>> dataset = ms.input.FileDataset(["a.npy", "b.npy"], np.load, batch_size=4)
        >>> list(dataset)
        [array([0, 1, 2, 0]), array([1, 2])]
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
        """Describe the dataset in a text that must be equal on all ranks.

        Its checksum covers the files' names without their folders, because each node may keep its files elsewhere.

        Example:
            >>> ms.input.FileDataset(["a.npy", "b.npy"], np.load, batch_size=4).summary()
            'FileDataset(2 files, checksum of their names ..., batch_size=4, drop_last=False, shuffle=False, seed=0)'
        """
        names = [os.path.basename(str(file)) for file in self.files]
        checksum = zlib.crc32("\n".join(names).encode())
        return self._summary(
            f"FileDataset({len(names)} files, checksum of their names {checksum:08x}"
        )

    def order(self, epoch: int) -> list[int]:
        """Return the numbers of the files in an epoch's reading order.

        Example:
            >>> dataset = ms.input.FileDataset(["a.npy", "b.npy", "c.npy"], np.load, batch_size=4, shuffle=True)
            >>> dataset.order(epoch=0)
            [2, 0, 1]
        """
        return self._order_of(len(self.files), epoch).tolist()

    def __iter__(self) -> Iterator[Any]:
        order = self.order(self.epoch)
        self.epoch += 1
        examples = joined(self.reader(self.files[i]) for i in order)
        batches = pieces_of_examples(examples, [self.batch_size], drop_last=self.drop_last)
        # After an error of `collate`, the iterator goes on with the next batch. A generator would end.
        return map(self.collate, batches)


def _as_it_is(batch: Any) -> Any:
    """Return `batch`: rows of arrays are a batch already."""
    return batch


def fetch(dataset: Any, indices: list[Any]) -> list[Any]:
    """Return the examples at `indices` of a map-style dataset, by one call of its `__getitems__` if there is one."""
    if getattr(dataset, "__getitems__", None):
        return dataset.__getitems__(indices)
    return [dataset[index] for index in indices]
