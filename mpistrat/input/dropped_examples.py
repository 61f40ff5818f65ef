"""Examples that a dataset gives as None, for a `collate_fn` of the program's to leave out: they did not come.

A replica's loss counts as much as its examples that came. Each rank counts its own, and `next` adds them up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from mpistrat import arrays, nest
from mpistrat.communicators import Communicator, reducing
from mpistrat.input.splitting import EMPTY, ReplicaPieces
from mpistrat.machine.notices import tell
from mpistrat.replicas.input_plan import StepExamples


class Collated(NamedTuple):
    """The batch that a `collate_fn` made of examples, and how many of the examples are None.

    A DataLoader pins the parts of such a tuple. The batch is None where all examples are.
    """

    batch: Any
    dropped: int


def batch_of(entry: Any) -> Any:
    return entry.batch if isinstance(entry, Collated) else entry


class DroppedExamples:
    """In the place of a `collate_fn` of the program's: it counts. A DataLoader copies it to its worker processes.

    Args: collate: this rank's `collate_fn`.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate
        self._has_spoken = False

    def __call__(self, examples: Any) -> Collated:
        # `__getitems__` may give anything: a batch, too. The function may take examples out of the list.
        dropped = sum(e is None for e in examples) if isinstance(examples, list) else 0
        # The function is not asked for a batch of nothing: other replicas may have examples.
        is_nothing = dropped and dropped == len(examples)
        return Collated(None if is_nothing else self._collate(examples), dropped)

    def count(
        self, step: ReplicaPieces, expected: StepExamples, communicator: Communicator
    ) -> None:
        """Give `step` its batches, in `Collated` or not until now, and how many examples came.

        Called by: every rank. Raises: the function's own error, where no example of the step came on any rank.
        """
        came = expected[:-1] - [e.dropped if isinstance(e, Collated) else 0 for e in step]
        step[:] = map(batch_of, step)
        words = np.array([came.sum(), sum(map(_rows, step, came.tolist()))])
        here, rows_here = words.tolist()
        communicator.all_reduce(words, reducing("sum", "examples that came"))
        total, rows = words.tolist()
        if not total:
            step[:] = map(self._of_nothing, step, expected.tolist())
            return
        if communicator.rank == 0 and rows_here * total != rows * here:
            self._tell_of_rows(
                f"{rows} rows of the {total} examples of a step, {rows_here} of {here} on the first rank"
            )
        step[:] = [b if n else EMPTY for b, n in zip(step, came, strict=True)]
        step.examples = np.append(came, total)

    def _of_nothing(self, batch: Any, count: int) -> Any:
        """As in one process, the function is asked for a batch, although none of its examples came."""
        return self._collate([None] * count) if batch is None else batch

    def _tell_of_rows(self, made: str) -> None:
        """Once."""
        if not self._has_spoken:
            self._has_spoken = True
            tell(
                f"a loader's collate_fn made {made}. Gradients count each rank by its examples. If collate_fn leaves "
                "some out, let the dataset give None for them: None does not count. If it packs examples, nothing is "
                "wrong"
            )


def _rows(batch: Any, count: int) -> int:
    """The first dimension that all arrays of a batch share; `count`, of its examples, where it may be another one.

    The batch may be a list of examples, or have them in another dimension.
    """
    leaves = [leaf for leaf in nest.flatten(batch) if arrays.is_array(leaf) and leaf.ndim]
    firsts = {int(leaf.shape[0]) for leaf in leaves}
    if not count or len(firsts) != 1 or len(leaves) % count == 0:
        return count
    everywhere = set.intersection(*(set(leaf.shape) for leaf in leaves))
    return count if count in everywhere else firsts.pop()


def batch_of_one(
    collate: Callable[[Any], Any], load: Callable[[list[Any]], Any], indices: Iterable[Any]
) -> Any:
    """A batch of the first example that came; None where none did. Args: load: gives the examples of indices."""
    counting = DroppedExamples(collate)
    batches = (counting(load([index])).batch for index in indices)
    return next((batch for batch in batches if batch is not None), None)
