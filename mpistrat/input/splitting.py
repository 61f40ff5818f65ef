"""Shares out the pieces of a global batch to the replicas, by the two rules of tf.distribute. Nothing is communicated.

The `n` replicas are spread over the workers. docs/glossary.md defines a worker.

- `pieces_of_each` cuts every global batch into n pieces of ceil(batch / n) examples; the last ones are short or empty.
  It is used when all workers have the same batches, and each worker takes its own pieces (AutoShardPolicy.DATA).
- `pieces_of_stream` ignores the boundaries of global batches, and cuts all examples of a worker into pieces of fixed
  sizes, in turn. It is used when a worker reads files of its own (FILE), or everything (OFF).

Both rules cut anything that a `Kind` can measure, cut and join: batches of arrays (`batches`), or lists of indices.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from mpistrat.replicas.input_plan import Share, StepExamples

# Entries of a step in place of a batch. EMPTY: the piece has no examples. MISSING: the data ends before this piece.
EMPTY = object()
MISSING = None

T = TypeVar("T")


class ReplicaPieces(list[Any]):
    """A step of one rank: a list with an entry for each replica of the rank.

    An entry is first a piece: the indices, examples or rows that one replica takes of a global batch. Later it is the
    batch that is made of the piece, or EMPTY or MISSING.

    Attributes:
        examples: the step's numbers of examples (`StepExamples`); None if this rank does not know how many other ranks
            read.
        position: the reader's position after this step, for `Reader.state`.
        following: number of later steps that this rank has read already.
        fails: whether this rank could not read the step after the `following` steps.
    """

    examples: StepExamples | None = None
    position: Any = None
    following = 0
    fails = False

    def replace_pieces(self, make: Callable[[Any], Any], position: Any = None) -> ReplicaPieces:
        """Replace each piece that has examples by `make(piece)`, and each empty piece by EMPTY, in this list itself.

        MISSING entries stay. Args: position: the step's new `position`. Returns: this step.
        """
        for i, piece in enumerate(self):
            if piece is not MISSING:
                self[i] = make(piece) if piece else EMPTY
        self.position = position
        return self


class Kind(Protocol):
    """How batches of one kind are measured, cut and joined along their examples.

    `size` returns a batch's number of examples. `cut` returns the batch of a slice of its examples. `join` returns one
    batch of all examples of several.
    """

    def size(self, batch: Any, /) -> int: ...

    def cut(self, batch: Any, part: slice, /) -> Any: ...

    def join(self, parts: list[Any]) -> Any: ...


class Lists:
    """Measures, cuts and joins lists of indices or of examples. It implements `Kind`."""

    size = staticmethod(len)
    cut = staticmethod(operator.getitem)

    def join(self, parts: list[list[Any]]) -> list[Any]:
        return list(joined(parts))


def next_items(source: Iterator[T], count: int) -> list[T]:
    """Return the next `count` items of `source`; fewer if it ends."""
    return list(itertools.islice(source, count))


def without_first(items: Iterable[T], count: int) -> Iterator[T]:
    """Return an iterator over `items` without the first `count`."""
    return itertools.islice(items, count, None)


def with_first_read(items: Iterator[T]) -> Iterator[T]:
    """Read the first item now. Returns: an iterator over all items, the first included."""
    first = next_items(items, 1)
    return joined([first, items])


def joined(parts: Iterable[Iterable[T]]) -> Iterator[T]:
    """Return an iterator over the items of all `parts`, one part after the other."""
    return itertools.chain.from_iterable(parts)


def pieces_of_examples(
    examples: Iterable[Any], sizes: Sequence[int], *, drop_last: bool = False
) -> Iterator[list[Any]]:
    """Yield lists of consecutive `examples`.

    Args:
        sizes: number of examples of each list; after the last size, the first follows again.
        drop_last: leave out a last list that is short.
    """
    source = iter(examples)
    for size in itertools.cycle(sizes):
        piece = next_items(source, size)
        if len(piece) < size:
            if piece and not drop_last:
                yield piece
            return
        yield piece


def slice_bounds(batch_size: int, piece: int, num_pieces: int) -> tuple[int, int]:
    """Return the range of examples of piece number `piece` of a global batch: its first, and the one after its last.

    Pieces have ceil(batch_size / num_pieces) examples. The last pieces are short, or empty with two equal bounds.
    """
    share = -(-batch_size // num_pieces)
    first = min(piece * share, batch_size)
    end = min(first + share, batch_size)
    return first, end


def pieces_of_each(
    batches: Iterable[Any], kind: Kind, wanted: Sequence[int], num_pieces: int
) -> Iterator[ReplicaPieces]:
    """Yield a step for each batch: a list of its pieces number `wanted`.

    A step's `examples` has the number of examples of each of these pieces and, last, of the whole batch.

    Args:
        wanted: numbers of this rank's pieces, 0 <= number < num_pieces.
        num_pieces: number of pieces of a batch. With 1, the batch is not cut and may be any object; the step's
            `examples` is None if `kind` cannot measure it.
    """
    # Of the last batch, because most have one size.
    size = -1
    parts = [slice(0)]
    examples = None
    for batch in batches:
        if num_pieces == 1:
            step = ReplicaPieces([batch] * len(wanted))
            examples = _examples_of_whole(batch, kind)
        else:
            if kind.size(batch) != size:
                size = kind.size(batch)
                parts = [slice(*slice_bounds(size, piece, num_pieces)) for piece in wanted]
                counts = [part.stop - part.start for part in parts]
                examples = np.array([*counts, size])
            step = ReplicaPieces([kind.cut(batch, part) for part in parts])
        step.examples = examples
        yield step


def _examples_of_whole(batch: Any, kind: Kind) -> StepExamples | None:
    """Return the numbers of examples of a batch that is not cut; None if `kind` cannot measure it."""
    try:
        size = kind.size(batch)
    except (TypeError, ValueError):  # the batch may be any object
        return None
    return np.array([size, size])


def pieces_of_stream(
    batches: Iterable[Any], kind: Kind, sizes: Sequence[int], *, drop_last: bool = False
) -> Iterator[Any]:
    """Yield the examples of all batches, one after the other, in pieces that do not keep to the batches' ends.

    Args:
        sizes: number of examples of each piece; after the last size, the first follows again. 0 gives an empty piece.
        drop_last: leave out the rest at the end. Otherwise the rest makes a short piece.
    """
    sizes_in_turn = itertools.cycle(sizes)
    size = next(sizes_in_turn)
    rest: Any = None  # a batch of the `left` examples that were read and are in no piece yet
    left = 0
    for batch in batches:
        rest = kind.join([rest, batch]) if left else batch
        left = kind.size(rest)
        while left >= size:
            yield kind.cut(rest, slice(size))
            rest = kind.cut(rest, slice(size, None))
            left -= size
            size = next(sizes_in_turn)
    if left and not drop_last:
        yield rest


def steps_of_stream(
    pieces: Iterable[Any], share: Share, *, drop_last: bool = False
) -> Iterator[ReplicaPieces]:
    """Yield this rank's steps: each step takes the worker's next pieces, one for each replica of the worker.

    A step has the entries of this rank's replicas only. An entry is MISSING where the pieces have ended.

    Args:
        pieces: the pieces of this rank's worker, in order.
        drop_last: leave out a step that lacks a piece for one of the worker's replicas.
    """
    source = iter(pieces)
    in_step = share.replicas_per_worker
    while step := next_items(source, in_step):
        missing = in_step - len(step)
        if missing and drop_last:
            return
        step += [MISSING] * missing
        yield ReplicaPieces(step[replica] for replica in share.replicas)
