"""Which replica gets which piece of a global batch: the two rules of tf.distribute, without communication.

`n` replicas are spread over the workers. docs/glossary.md says which ranks are a worker.

- `pieces_of_each`: every global batch is cut into n pieces of ceil(batch / n) examples, the last ones short or empty.
  Used when all workers have the same batches, and each takes its own pieces (AutoShardPolicy.DATA).
- `pieces_of_stream`: the boundaries of global batches vanish, and the examples that a worker reads are cut into pieces
  of fixed sizes, in turn. Used when a worker reads files of its own (FILE), or everything (OFF).

Both work on anything that can be measured, cut and joined: batches of arrays (`batches`), or lists of indices.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from mpistrat.replicas.input_plan import Share, StepExamples

# Entries of a step in place of a batch: of a piece without examples, and where the data ends before the step is full.
EMPTY, MISSING = object(), None

_END = object()


class ReplicaPieces(list[Any]):
    """A step: an entry for each replica of the rank. An entry is a piece of a global batch, and later its batch.

    Attributes:
        examples: how many the step has; None where this rank does not know how many other ranks read.
        position: where this step has left its reader, as `Reader.state` takes it.
        following: how many steps surely follow it.
        fails: an error comes after those.
    """

    examples: StepExamples | None = None
    position: Any = None
    following = 0
    fails = False

    def replace_pieces(self, make: Callable[[Any], Any], position: Any = None) -> ReplicaPieces:
        """This step, after `make(piece)` took the place of each piece with examples, and EMPTY that of others."""
        for i, piece in enumerate(self):
            if piece is not MISSING:
                self[i] = make(piece) if piece else EMPTY
        self.position = position
        return self


class Kind(Protocol):
    """What is cut: measured, cut and joined along the examples."""

    def size(self, batch: Any, /) -> int: ...

    def cut(self, batch: Any, part: slice, /) -> Any: ...

    def join(self, parts: list[Any]) -> Any: ...


class Lists:
    """Batches that are lists, of indices or of examples."""

    size = staticmethod(len)
    cut = staticmethod(operator.getitem)

    def join(self, parts: list[list[Any]]) -> list[Any]:
        return list(itertools.chain.from_iterable(parts))


def pieces_of_examples(
    examples: Iterable[Any], sizes: Sequence[int], *, drop_last: bool = False
) -> Iterator[list[Any]]:
    """`pieces_of_stream`, of examples that come one by one."""
    source = iter(examples)
    for size in itertools.cycle(sizes):
        piece = list(itertools.islice(source, size))
        if len(piece) < size:
            if piece and not drop_last:
                yield piece
            return
        yield piece


def slice_bounds(batch_size: int, piece: int, num_pieces: int) -> tuple[int, int]:
    """The first example of a piece of a global batch, and the one after its last."""
    share = -(-batch_size // num_pieces)
    return min(piece * share, batch_size), min((piece + 1) * share, batch_size)


def pieces_of_each(
    batches: Iterable[Any], kind: Kind, wanted: Sequence[int], num_pieces: int
) -> Iterator[ReplicaPieces]:
    """For each batch its pieces number `wanted`. One piece is the batch as it is, whatever that is."""
    size, parts, examples = -1, [slice(0)], None  # of the batches so far, which mostly are alike
    for batch in batches:
        if num_pieces == 1:
            step, examples = ReplicaPieces([batch] * len(wanted)), _examples_of_whole(batch, kind)
        else:
            if kind.size(batch) != size:
                size = kind.size(batch)
                parts = [slice(*slice_bounds(size, piece, num_pieces)) for piece in wanted]
                examples = np.array([*(part.stop - part.start for part in parts), size])
            step = ReplicaPieces([kind.cut(batch, part) for part in parts])
        step.examples = examples
        yield step


def _examples_of_whole(batch: Any, kind: Kind) -> StepExamples | None:
    try:
        size = kind.size(batch)
    except (TypeError, ValueError):  # it need not be a batch: nothing is cut
        return None
    return np.array([size, size])


def pieces_of_stream(
    batches: Iterable[Any], kind: Kind, sizes: Sequence[int], *, drop_last: bool = False
) -> Iterator[Any]:
    """The examples of all batches, one after the other, in pieces of `sizes`, in turn.

    What is left at the end makes a short piece, or is dropped. Sizes of 0 make empty pieces.
    """
    source = iter(batches)
    rest: Any = None  # of the batches read so far: a batch of `left` examples
    left = 0
    for size in itertools.cycle(sizes):
        while rest is None or left < size:
            batch = next(source, _END)
            if batch is _END:
                if left and not drop_last:
                    yield rest
                return
            rest = kind.join([rest, batch]) if left else batch
            left = kind.size(rest)
        yield kind.cut(rest, slice(size))
        rest = kind.cut(rest, slice(size, None))
        left -= size


def steps_of_stream(
    pieces: Iterable[Any], share: Share, *, drop_last: bool = False
) -> Iterator[ReplicaPieces]:
    """A worker's pieces, dealt out to its replicas; of each step those of this rank, None where there is none.

    With `drop_last`, a step that does not have a piece for each replica of the worker is left out.
    """
    source = iter(pieces)
    while step := list(itertools.islice(source, share.replicas_per_worker)):
        missing = share.replicas_per_worker - len(step)
        if missing and drop_last:
            return
        step += [MISSING] * missing
        yield ReplicaPieces(map(step.__getitem__, share.replicas))
