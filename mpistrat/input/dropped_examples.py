"""Counts examples that a dataset could not load: it gives None for them, and the program's `collate_fn` drops the None.

A replica's loss then counts by the number of its other examples, the examples that came. Each rank counts its own
examples, and `next` adds up the counts of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from mpistrat import arrays, nest
from mpistrat.communicators import Communicator, reducing
from mpistrat.input.batch_structure import rows_of
from mpistrat.input.splitting import EMPTY, ReplicaPieces
from mpistrat.machine.notices import tell
from mpistrat.replicas.input_plan import StepExamples


class Collated(NamedTuple):
    """The batch that a `collate_fn` made, and the number of None among the examples that it got.

    The batch is None if all examples are None; `collate_fn` was then not called. This is a tuple, because a DataLoader
    pins the parts of tuples.
    """

    batch: Any
    dropped: int


def batch_of(entry: Any) -> Any:
    return entry.batch if isinstance(entry, Collated) else entry


class DroppedExamples:
    """Stands in for the program's `collate_fn` and counts the examples that are None.

    A DataLoader copies this object to its worker processes.

    Args: collate: this rank's `collate_fn`.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate
        self._has_spoken = False

    def __call__(self, examples: Any) -> Collated:
        """Return the batch of `examples`, and how many of them are None. Called by: a DataLoader or a reader."""
        # `__getitems__` may return anything, even a batch. Count before `collate_fn` removes examples from the list.
        dropped = 0
        if isinstance(examples, list):
            dropped = sum(example is None for example in examples)
        # Do not ask `collate_fn` for a batch of nothing, because other replicas may have examples.
        if dropped and dropped == len(examples):
            return Collated(None, dropped)
        return Collated(self._collate(examples), dropped)

    def count(
        self, step: ReplicaPieces, expected: StepExamples, communicator: Communicator
    ) -> None:
        """Replace the entries of `step` by their batches, and set `step.examples` to the numbers of examples that came.

        An entry becomes EMPTY if none of its examples came. If none came on any rank, `collate_fn` gets a list of None,
        as torch would give it, and `step.examples` stays.

        Called by: every rank, for each step.
        Args:
            step: one entry for each replica of this rank, `Collated` or a batch. It is changed in place.
            expected: the numbers of examples with None counted, for each replica of this rank and, last, for all.
        Raises: the error of `collate_fn`, if it does not take a list of None.
        """
        dropped = [entry.dropped if isinstance(entry, Collated) else 0 for entry in step]
        came = expected[:-1] - dropped
        step[:] = [batch_of(entry) for entry in step]
        here = came.sum()
        rows_here = sum(map(_rows, step, came.tolist()))
        words = np.array([here, rows_here])
        communicator.all_reduce(words, reducing("sum", "examples that came"))
        total, rows = words.tolist()
        if not total:
            for i, batch in enumerate(step):
                if batch is None:
                    examples = [None] * int(expected[i])
                    step[i] = self._collate(examples)
            return
        differs = rows_here * total != rows * here
        if differs and communicator.rank == 0 and not self._has_spoken:
            self._has_spoken = True
            tell(
                f"a loader's collate_fn made {rows} rows of the {total} examples of a step, {rows_here} of {here} on "
                "the first rank, and gradients count each rank by its examples. If collate_fn leaves some out, let the "
                "dataset give None for them: None does not count. If it packs examples, nothing is wrong"
            )
        for i, number in enumerate(came):
            if not number:
                step[i] = EMPTY
        step.examples = np.append(came, total)


def _rows(batch: Any, count: int) -> int:
    """Return the number of rows of a batch: the first dimension of its arrays, if it is the same for all of them.

    Otherwise return `count`, the number of the batch's examples that came. Return it, too, if the batch may be a list
    of examples (`count` divides the number of arrays), or if all arrays have another dimension of size `count`.
    """
    shapes = []
    for leaf in nest.flatten(batch):
        if rows_of(leaf) is not None and not arrays.is_nested(leaf):
            shapes.append(tuple(leaf.shape))
    firsts = {int(shape[0]) for shape in shapes}
    if not count or len(firsts) != 1:
        return count
    everywhere = set(shapes[0]).intersection(*shapes)
    if len(shapes) % count == 0 or count in everywhere:
        return count
    return firsts.pop()


def batch_of_one(
    collate: Callable[[Any], Any], load: Callable[[list[Any]], Any], indices: Iterable[Any]
) -> Any:
    """Return a batch of the first example that is not None; None if there is no such example.

    Args:
        collate: the dataset's `collate_fn`.
        load: returns the examples at a list of indices.
        indices: the indices to try, in order.
    """
    counting = DroppedExamples(collate)
    for index in indices:
        batch = counting(load([index])).batch
        if batch is not None:
            return batch
    return None
