"""`Blocks`: the ranks of a node copy buffers of ordinary memory to each other, in pieces, through shared memory."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.communicators.host_views import address_of
from mpistrat.communicators.node.shared_memory import FENCE
from mpistrat.communicators.reduction.arithmetic import Arithmetic, share_of
from mpistrat.liveness.records.watch import CommunicatorWatch
from mpistrat.liveness.waiting import wait_until

PAGE = 4096
# For each rank: the number of its blocks, the bytes of a block, and how many of these bytes one rank combines. A larger
# block does not stay in the caches until other ranks read it; smaller blocks need more meetings.
_SLOTS = 3
_BLOCK = 1 << 20
_WIDTH = 1 << 18
# Bytes that a rank writes for all other ranks before they meet. They are still in the caches when the other ranks read
# them.
_STEP = 1 << 19

# The indices of 8-byte words in a segment's first page: the rank's number of meetings, and its number for `exchange`.
_TICK = 0
_PLACE = 8


class Unbroken(contextlib.AbstractContextManager[None]):
    """A context around a collective that no rank may leave in its middle, because the other ranks wait for its part.

    It lets an error of the block pass, and remembers it.

    Args:
        purpose: the thing that this rank can no longer do, for the message: "share memory with others".
        call: words for the collective, for the message.

    Raises: RuntimeError on entering, if an error has left the block before.
    """

    def __init__(self, purpose: str, call: str = "a collective") -> None:
        self._purpose = purpose
        self._call = call
        self._error: BaseException | None = None

    def __enter__(self) -> None:
        if self._error is not None:
            raise RuntimeError(
                f"this rank cannot {self._purpose} any more: it left {self._call} in its middle, for "
                f"{type(self._error).__name__}, and others may wait for its part. Save the results that you need "
                "and end the program"
            ) from self._error

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._error = error


class Blocks:
    """Shared memory where the ranks of a node meet (`tick`), and pass each other pieces of buffers, called blocks.

    Each rank has three blocks of 1 MB, used in turn. It writes its values into one before a tick; after the tick, each
    rank combines its part of all ranks' blocks; after the next tick, all ranks read the results there. With two blocks
    a rank would write cache lines that another rank has just read, and that takes longer.

    Args:
        segments: the shared segment of each rank, of `NBYTES` bytes, in rank order.
        rank: this rank's number.
        watch: the rank's record of the calls that it waits in; `tick` waits with its timeout.

    Attributes:
        unbroken: the context around each collective. If an error leaves it, later collectives raise RuntimeError.
    """

    NBYTES = PAGE + _SLOTS * _BLOCK  # the bytes of a segment

    def __init__(self, segments: list[np.ndarray], rank: int, watch: CommunicatorWatch) -> None:
        self.rank = rank
        self._size = len(segments)
        self._watch = watch
        self.unbroken = Unbroken("share memory with others")
        self._words = [segment[:PAGE].data.cast("q") for segment in segments]
        self._others = sorted({*range(self._size)} - {rank})
        self._peers = [self._words[peer] for peer in self._others]
        self._own_first = [rank, *self._others]
        self._slots = slots = [
            [segment[first : first + _BLOCK] for segment in segments]
            for first in range(PAGE, self.NBYTES, _BLOCK)
        ]
        self._ticks = 0

        @functools.lru_cache
        def elements(how: Arithmetic) -> list[list[Any]]:
            return [[how.view(slot) for slot in of_ranks] for of_ranks in slots]

        self._elements = elements

    def tick(self) -> None:
        """Wait until every rank has called `tick` as often as this rank. The ranks' earlier writes are visible then.

        Raises: StallError or RankLostError if a rank does not come.
        """
        self._ticks = ticks = self._ticks + 1
        if FENCE is not None:
            FENCE()
        self._words[self.rank][_TICK] = ticks
        for words in self._peers:
            if words[_TICK] < ticks:
                wait_until(lambda words=words: words[_TICK] >= ticks, self._watch)  # type: ignore[misc]
        if FENCE is not None:
            FENCE()

    def exchange(self, place: int) -> list[int]:
        """Return the integers `place` of all ranks, in rank order. Collective.

        Called by: `Window.find`. Between two calls of `exchange`, all ranks must call `tick` (wait for all ranks) once,
        besides the tick inside `exchange`. Else a fast rank would overwrite its `place` before others have read it.
        """
        self._words[self.rank][_PLACE] = place
        self.tick()
        return [words[_PLACE] for words in self._words]

    def all_reduce(
        self,
        how: Arithmetic,
        source: Any,
        target: Any,
        scale: float | None,
        takers: Sequence[int] = (),
    ) -> None:
        """All-reduce in blocks: between two ticks, write the next block, and combine a part of the present block.

        The combining rank writes its result over the other ranks' values. It has just read them, so these cache lines
        are near its core. To fetch other lines from distant cores takes ten times as long.

        Args:
            how: combines elements of the dtype.
            source: this rank's elements, in one dimension.
            target: gets the result; it may be `source`.
            scale: a factor of the result; None: the result as it is.
            takers: the ranks that get the result; empty: all ranks.
        """
        slots = self._elements(how)
        rank = self.rank
        takers = takers or self._own_first
        width = _width(self._size, len(source) * how.itemsize) // how.itemsize
        step = width * self._size
        own_place = rank * width
        with self.unbroken:
            for start in range(0, len(source) + step, step):
                room = slots[self._ticks % _SLOTS][rank]
                brought = slots[(self._ticks - 1) % _SLOTS]
                for peer in self._others:
                    place = peer * width
                    begin = start + place
                    part = source[begin : begin + width]
                    room[place : place + len(part)] = part
                before = start - step
                first = before + own_place
                if 0 <= first < len(source):
                    own = source[first : first + width]
                    own_part = slice(own_place, own_place + len(own))
                    pieces = [own] * self._size
                    for peer in self._others:
                        pieces[peer] = brought[peer][own_part]
                    results = pieces.copy()
                    results[rank] = target[first : first + width]
                    how.combine(pieces, results[takers[0]], scale)
                    for taker in takers[1:]:
                        results[taker][:] = results[takers[0]]
                self.tick()
                if start and rank in takers:
                    combined = brought[rank]
                    for peer in self._others:
                        place = peer * width
                        begin = before + place
                        part = target[begin : begin + width]
                        part[:] = combined[place : place + len(part)]

    def reduce_scatter(self, how: Arithmetic, source: np.ndarray, out: np.ndarray) -> None:
        """Combine the ranks' `source`, and give each rank its part in `out`; both are bytes. Collective."""
        bounds = share_of(len(source), len(out), self._size)
        self.combine_slice(how, source, bounds, how.view(out))

    def combine_slice(
        self, how: Arithmetic, source: np.ndarray, bounds: Sequence[tuple[int, int]], out: Any
    ) -> None:
        """Combine this rank's slice of all ranks' `source` into `out`. Collective.

        Args:
            how: combines elements of the dtype.
            source: this rank's buffer, as bytes; it keeps its values.
            bounds: for each rank, the first byte of its slice, and the byte after its last; some may be empty.
            out: gets the combined slice, as elements of `how` along its last axis.
        """
        width = _width(self._size)
        first, end = bounds[self.rank]
        longest = max(stop - start for start, stop in bounds)
        blocks = -(-longest // width)
        place = self.rank * width
        with self.unbroken:
            for i in range(blocks + 1):
                if i < blocks:
                    self._bring(source, bounds, i * width, width)
                start = first + (i - 1) * width
                if i > 0 and start < end:
                    part = source[start : min(start + width, end)]
                    own = how.view(part)
                    own_part = slice(place, place + len(part))
                    slots = self._slots[(self._ticks - 1) % _SLOTS]
                    pieces = [how.view(slot[own_part]) for slot in slots]
                    pieces[self.rank] = own
                    begin = (i - 1) * width // how.itemsize
                    total = out[..., begin : begin + len(own)]
                    how.combine(pieces, total, None)
                self.tick()

    def _bring(
        self, source: np.ndarray, bounds: Sequence[tuple[int, int]], offset: int, width: int
    ) -> None:
        """Copy the next bytes for each other rank, up to `width` bytes each, to this rank's block before the next tick.

        Args:
            source: this rank's buffer, as bytes.
            bounds: for each rank, the index of the first byte in `source` for it, and the index after its last.
            offset: how many bytes for each rank were copied before; they are not copied again.
            width: bytes of the block that belong to each rank.
        """
        slot = self._slots[self._ticks % _SLOTS][self.rank]
        for peer in self._others:
            first, stop = bounds[peer]
            start = first + offset
            part = source[start : min(start + width, stop)]
            place = peer * width
            slot[place : place + len(part)] = part

    def broadcast(self, memory: np.ndarray, root: int) -> None:
        """Overwrite the bytes `memory` of every rank with the root's. Collective."""
        with self.unbroken:
            for start in range(0, len(memory), _STEP):
                slot = self._slots[self._ticks % _SLOTS][root]
                part = memory[start : start + _STEP]
                if self.rank == root:
                    slot[: len(part)] = part
                self.tick()
                if self.rank != root:
                    part[:] = slot[: len(part)]

    def all_to_all(
        self,
        source: np.ndarray,
        target: np.ndarray,
        starts: np.ndarray,
        received: Sequence[int],
    ) -> None:
        """Send each rank some bytes of `source`: each block has a part for every rank. Collective.

        Args:
            target: gets the bytes that arrive, in rank order.
            starts: for each rank, a row: the index of its first byte for each rank, then the number of all its bytes.
            received: how many bytes this rank expects from each rank.
        """
        lengths = np.diff(starts)
        width = _BLOCK // self._size
        bounds = list(itertools.pairwise(starts[self.rank].tolist()))
        ends = np.cumsum(received)
        parts = np.split(target, ends[:-1])
        first, end = bounds[self.rank]
        _copy(source[first:end], parts[self.rank])
        np.fill_diagonal(lengths, 0)
        place = self.rank * width
        with self.unbroken:
            for start in range(0, lengths.max(), width):
                slots = self._slots[self._ticks % _SLOTS]
                self._bring(source, bounds, start, width)
                self.tick()
                for peer in self._others:
                    rest = lengths[peer, self.rank] - start
                    arrived = max(0, min(rest, width))
                    brought = slots[peer][place : place + arrived]
                    _copy(brought, parts[peer][start:])

    def gather(self, part: np.ndarray, parts: Sequence[np.ndarray]) -> None:
        """Copy every rank's `part` into `parts`, on all ranks. Collective.

        Args:
            part: this rank's bytes. It may be the memory of this rank's entry of `parts`; then it is not copied.
            parts: for each rank, in rank order, memory for its bytes, as long as that rank's `part`.
        """
        target = parts[self.rank]
        lies_there = address_of(part) == address_of(target)
        longest = max(len(each) for each in parts)
        with self.unbroken:
            for start in range(0, longest, _STEP):
                slots = self._slots[self._ticks % _SLOTS]
                here = slice(start, start + _STEP)
                brought = part[here]
                slots[self.rank][: len(brought)] = brought
                if not lies_there:
                    target[here] = brought
                self.tick()
                for peer in self._others:
                    taken = parts[peer][here]
                    taken[:] = slots[peer][: len(taken)]


def _copy(source: np.ndarray, target: np.ndarray) -> None:
    """Copy bytes from `source` to `target`, as many as the shorter has."""
    length = min(len(source), len(target))
    target[:length] = source[:length]


@functools.lru_cache
def _width(size: int, nbytes: int | None = None) -> int:
    """Return how many bytes of a block each of `size` ranks combines: a multiple of 64, so whole elements.

    Args: nbytes: bytes of the whole buffer; a small buffer is divided equally. None: the buffer is large.
    """
    width = max(64, min(_WIDTH, _BLOCK // size // 64 * 64))
    if nbytes is None:
        return width
    cache_lines = -(-nbytes // (size * 64))
    return min(width, max(64, cache_lines * 64))
