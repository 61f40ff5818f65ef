"""How the ranks of a node meet, and combine what lies in their shared memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.communicators.arithmetic import Arithmetic, arithmetic_of
from mpistrat.communicators.host_views import bytes_of
from mpistrat.communicators.node.shared_memory import before_others_see
from mpistrat.communicators.recycled_buffers import RecycledBuffers
from mpistrat.communicators.reduction import Reduction
from mpistrat.communicators.reduction_tree import ReductionTree
from mpistrat.communicators.transports.transport import Mover
from mpistrat.communicators.tree_sum import tree_sum_of
from mpistrat.liveness.waiting import wait_until
from mpistrat.liveness.watch import CommunicatorWatch

PAGE = 4096
# Of a rank's memory for what does not lie in the window: blocks in flight, the bytes of one, and what one rank combines
# of it. What is larger than the caches goes through main memory once more; what is smaller costs more meetings.
_SLOTS = 3
_BLOCK = 1 << 20
_WIDTH = 1 << 18
# Combined and handed out before the next, while it is in the caches.
_CHUNK = 1 << 18
# Results of different backwards, and of different dtypes, that may be in use at once.
_BUFFERS = 3

# Words of a segment's first page.
_TICK, _PLACE = 0, 8
NOWHERE = -1


class Blocks(Mover):
    """Where ranks meet, and hand each other blocks of what does not lie in the window.

    The block of tick t is written before it, combined after it, and read after tick t + 1: so its slot may be written
    again after tick t + 2, which needs three.
    """

    NBYTES = PAGE + _SLOTS * _BLOCK  # of a segment

    def __init__(self, segments: list[np.ndarray], rank: int, watch: CommunicatorWatch) -> None:
        self.rank, self._size, self._watch = rank, len(segments), watch
        words = [memoryview(segment[:PAGE].data).cast("q") for segment in segments]
        self._mine = words[rank]
        self._words = words
        self._peers = [word for peer, word in enumerate(words) if peer != rank]
        self._others = [peer for peer in range(self._size) if peer != rank]
        self._slots = [
            [segment[PAGE + i * _BLOCK : PAGE + (i + 1) * _BLOCK] for segment in segments]
            for i in range(_SLOTS)
        ]
        self._ticks = 0
        self._torn: BaseException | None = None

    def __enter__(self) -> None:
        """Around a whole collective: one that a rank leaves in its middle cannot be followed by another.

        Raises: RuntimeError after such a one.
        """
        if self._torn is not None:
            raise RuntimeError(
                "this rank cannot share memory with others any more: it left a collective in its middle, for "
                f"{type(self._torn).__name__}, and others may wait for its part. Save what you need and end the program"
            ) from self._torn

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._torn = error

    def tick(self) -> None:
        """Return once every rank has come here as often."""
        self._ticks = ticks = self._ticks + 1
        before_others_see()
        self._mine[_TICK] = ticks
        for words in self._peers:
            if words[_TICK] < ticks:
                wait_until(lambda words=words: words[_TICK] >= ticks, self._watch)  # type: ignore[misc]
        before_others_see()

    def tell(self, place: int) -> list[int]:
        """What every rank tells. Ranks meet in something else before they tell again."""
        self._mine[_PLACE] = place
        self.tick()
        return [words[_PLACE] for words in self._words]

    def all_reduce(
        self,
        buffer: Array,
        reduction: Reduction,
        out: Array | None = None,
        tree: ReductionTree | None = None,
        root: int | None = None,
    ) -> None:
        """Block after block: when one has been brought, the one before is combined, then taken.

        Args: root: who alone takes the result; None: all ranks.
        """
        how = how_to_add(buffer, reduction, tree)
        source, target = bytes_of(buffer), bytes_of(buffer if out is None else out)
        takes = root is None or root == self.rank
        rank, width = self.rank, _width(self._size, len(source))
        step = width * self._size
        blocks = -(-len(source) // step)
        with self:
            for i in range(blocks + 1):
                if i < blocks:
                    slot = self._slots[self._ticks % _SLOTS][rank]
                    for peer in self._others:
                        start = i * step + peer * width
                        brought = source[start : start + width]
                        slot[peer * width : peer * width + len(brought)] = brought
                start = (i - 1) * step + rank * width
                if i > 0 and start < len(source):
                    own = source[start : start + width]
                    here = slice(rank * width, rank * width + len(own))
                    slots = self._slots[(self._ticks - 1) % _SLOTS]
                    pieces = [how.view(memory[here]) for memory in slots]
                    pieces[rank] = how.view(own)
                    result = slots[rank][here]
                    how.combine(pieces, how.view(result), reduction.scale)
                    if takes:
                        target[start : start + len(own)] = result
                self.tick()
                if i > 0 and takes:
                    slots = self._slots[(self._ticks - 2) % _SLOTS]
                    for peer in self._others:
                        start = (i - 1) * step + peer * width
                        taken = target[start : start + width]
                        taken[:] = slots[peer][peer * width : peer * width + len(taken)]

    def reduce(self, buffer: Array, root: int, reduction: Reduction) -> None:
        self.all_reduce(buffer, reduction, root=root)

    def reduce_scatter(self, buffer: Array, out: Array, reduction: Reduction) -> None:
        how = how_to_add(buffer, reduction)
        nbytes = int(buffer.nbytes)
        bounds = share_of(nbytes, nbytes // self._size, self._size)
        self.combine_slice(how, bytes_of(buffer), bounds, how.view(bytes_of(out)))

    def combine_slice(
        self, how: Arithmetic, source: np.ndarray, bounds: Sequence[tuple[int, int]], out: Any
    ) -> None:
        """`out`, elements as `how` has them, gets what all ranks have between this rank's `bounds`, in bytes."""
        rank, width = self.rank, _width(self._size)
        mine, end = bounds[rank]
        longest = max(stop - start for start, stop in bounds)
        blocks = -(-longest // width)
        with self:
            for i in range(blocks + 1):
                if i < blocks:
                    slot = self._slots[self._ticks % _SLOTS][rank]
                    for peer in self._others:
                        start, stop = bounds[peer]
                        start += i * width
                        brought = source[start : min(start + width, max(start, stop))]
                        slot[peer * width : peer * width + len(brought)] = brought
                start = mine + (i - 1) * width
                if i > 0 and start < end:
                    own = source[start : min(start + width, end)]
                    here = slice(rank * width, rank * width + len(own))
                    slots = self._slots[(self._ticks - 1) % _SLOTS]
                    pieces = [how.view(memory[here]) for memory in slots]
                    pieces[rank] = how.view(own)
                    begin = (i - 1) * width // how.itemsize
                    how.combine(pieces, out[..., begin : begin + len(own) // how.itemsize], None)
                self.tick()

    def broadcast(self, buffer: Array, root: int) -> None:
        memory = bytes_of(buffer)
        with self:
            for start in range(0, len(memory), _BLOCK):
                slot = self._slots[self._ticks % _SLOTS][root]
                part = memory[start : start + _BLOCK]
                if self.rank == root:
                    slot[: len(part)] = part
                self.tick()
                if self.rank != root:
                    part[:] = slot[: len(part)]

    def gather(self, mine: np.ndarray, parts: Sequence[np.ndarray]) -> None:
        """Every rank's `mine`, in `parts` by rank, all of them bytes. `mine` may lie in this rank's part already."""
        if mine.ctypes.data != parts[self.rank].ctypes.data:
            parts[self.rank][:] = mine
        with self:
            for start in range(0, max(map(len, parts)), _BLOCK):
                slots = self._slots[self._ticks % _SLOTS]
                brought = mine[start : start + _BLOCK]
                slots[self.rank][: len(brought)] = brought
                self.tick()
                for peer in self._others:
                    taken = parts[peer][start : start + _BLOCK]
                    taken[:] = slots[peer][: len(taken)]


class Window(Mover):
    """Buffers that are combined where they lie. Each rank hands out its own; the places need not be the same.

    Args:
        segments: of `nbytes_for` the largest buffer.
        blocks: where the same ranks meet.

    Attributes:
        capacity: bytes of the largest buffer.
    """

    def __init__(self, segments: list[np.ndarray], rank: int, blocks: Blocks) -> None:
        self._blocks = blocks
        self._places: list[int] = []
        capacity = (len(segments[rank]) - PAGE) // _BUFFERS
        self.capacity = capacity
        self._segments, self.rank, self._size = segments, rank, len(segments)
        self._others = [peer for peer in range(self._size) if peer != rank]
        self._address = segments[rank].ctypes.data
        # Of memoryviews: a slice of a slice of an array refers to the whole array only, not to the slice.
        mine = segments[rank].data
        self._buffers = RecycledBuffers.of(
            [
                np.frombuffer(mine[PAGE + i * capacity : PAGE + (i + 1) * capacity], np.uint8)
                for i in range(_BUFFERS)
            ]
        )

    @staticmethod
    def nbytes_for(largest: int) -> int:
        """Of a segment for buffers of up to `largest` bytes."""
        return PAGE + _BUFFERS * -(-largest // PAGE) * PAGE

    def take(self, nbytes: int) -> np.ndarray | None:
        """A buffer that nothing refers to; None when all are in use."""
        return self._buffers.free(nbytes)

    def idle_bytes(self) -> int:
        """Of this rank's segment, which it gives back with the window; 0 while anything refers to its buffers."""
        return len(self._segments[self.rank]) if self._buffers.are_idle() else 0

    def place_of(self, memory: np.ndarray) -> int:
        """Where `memory` begins in this rank's segment; NOWHERE for other memory."""
        place = int(memory.ctypes.data) - self._address
        return place if 0 < place < len(self._segments[self.rank]) else NOWHERE

    def find(self, buffer: Array, out: Array | None) -> list[int] | None:
        """Where each rank's `buffer` begins in its segment; None unless all lie there. Collective.

        What is found is what `all_reduce` combines next.
        """
        if buffer.nbytes > self.capacity:
            return None
        mine = NOWHERE if out is not None else self.place_of(bytes_of(buffer))
        with self._blocks:
            self._places = self._blocks.tell(mine)
        return None if NOWHERE in self._places else self._places

    def all_reduce(
        self,
        buffer: Array,
        reduction: Reduction,
        out: Array | None = None,
        tree: ReductionTree | None = None,
    ) -> None:
        """Combine this rank's share of all buffers, into all of them."""
        how = how_to_add(buffer, reduction, tree)
        first, end = share_of(int(buffer.nbytes), how.itemsize, self._size)[self.rank]
        with self._blocks:
            for pieces in self._chunks(how, self._places, first, end):
                mine = pieces[self.rank]
                how.combine(pieces, mine, reduction.scale)
                for peer in self._others:
                    pieces[peer][:] = mine
            self._blocks.tick()  # nobody goes on while others read or write its memory

    def combine(
        self, how: Arithmetic, places: Sequence[int], bounds: tuple[int, int], out: Any
    ) -> None:
        """`out`, elements as `how` has them, gets what all buffers hold between `bounds`, in bytes."""
        begin = 0
        for pieces in self._chunks(how, places, *bounds):
            end = begin + len(pieces[0])
            how.combine(pieces, out[..., begin:end], None)
            begin = end

    def spread(
        self, how: Arithmetic, places: Sequence[int], bounds: tuple[int, int], value: Any
    ) -> None:
        """Put `value` into all buffers, between `bounds`."""
        begin = 0
        for pieces in self._chunks(how, places, *bounds):
            end = begin + len(pieces[0])
            for piece in pieces:
                piece[:] = value[begin:end]
            begin = end

    def _chunks(
        self, how: Arithmetic, places: Sequence[int], first: int, end: int
    ) -> Iterator[list[Any]]:
        buffers = [
            how.view(segment[place + first : place + end])
            for segment, place in zip(self._segments, places, strict=True)
        ]
        chunk = _CHUNK // how.itemsize
        for start in range(0, (end - first) // how.itemsize, chunk):
            yield [buffer[start : start + chunk] for buffer in buffers]


def how_to_add(
    buffer: Array, reduction: Reduction, tree: ReductionTree | None = None
) -> Arithmetic:
    """For buffers that memory takes."""
    how = arithmetic_of(buffer, reduction.op) if tree is None else tree_sum_of(buffer, tree)
    assert how is not None
    return how


def share_of(
    nbytes: int, itemsize: int, ranks: int, of: int | None = None
) -> list[tuple[int, int]]:
    """The bytes that each of `ranks` combines: whole elements, as equally as they can be. Only the first `of` do."""
    of = of or ranks
    elements = nbytes // itemsize
    cuts = [elements * min(i, of) // of * itemsize for i in range(ranks + 1)]
    return list(itertools.pairwise(cuts))


def _width(size: int, nbytes: int | None = None) -> int:
    """Bytes of a block that each of `size` ranks combines: whole cache lines, which hold whole elements.

    Args: nbytes: of the whole buffer; of one that is smaller than a block, all ranks combine as much.
    """
    width = max(64, min(_WIDTH, _BLOCK // size // 64 * 64))
    return width if nbytes is None else min(width, max(64, -(-nbytes // (size * 64)) * 64))
