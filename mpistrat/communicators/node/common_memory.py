"""Memory of which the ranks of a node keep one copy, though each may write all of it.

Every rank owns a slice, and only the owner changes the copy there. All ranks read the copy through views, mappings
that are copied on write: a page that a rank writes in its view is its own until it renews the view. So a program may
use such memory as its own, and pages that nobody writes exist once.

The kernel does this for a MAP_PRIVATE mapping of a file in memory: a page that was not written is the page of the file
itself, and shows what others write there. POSIX leaves that open, so it is tried before it is relied on.
/proc/self/pagemap says which pages were written, whatever wrote them.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrat.arrays import Array
from mpistrat.communicators.node import shared_memory
from mpistrat.communicators.node.blocks import Blocks
from mpistrat.communicators.reduction.arithmetic import arithmetic_of, scale

PAGE = mmap.PAGESIZE
# Bytes that are combined before the next, while they are in the caches.
_CHUNK = 1 << 18
# A view that is written before every renewal, as clipping writes gradients, keeps its pages, and the copy goes into
# them: dropping them costs page faults, ten times as much. After so many renewals they are dropped, in case it ended.
_COPIED_TIMES = 50

# <linux/fs.h>, Documentation/admin-guide/mm/pagemap.rst: a page in memory or swapped out, and one of a file.
_PRESENT_OR_SWAPPED, _OF_FILE = np.uint64(3 << 62), np.uint64(1 << 61)


class ByteRange(NamedTuple):
    """Bytes from `first` to before `end` whose contributions are summed.

    Attributes:
        like: an array of their dtype.
        added: the sum is added to what this rank's view holds there; otherwise it replaces that.
    """

    like: Array
    first: int
    end: int
    added: bool


class View:
    """A rank's mapping of a `CommonMemory`.

    Attributes:
        memory: its bytes. A page that was written here is this rank's own until it is renewed.
    """

    def __init__(self, memory: np.ndarray, shared: np.ndarray) -> None:
        self.memory = memory
        self.address = int(memory.ctypes.data)
        self._shared = shared
        self._times_written = 0  # in a row

    def holds(self, address: int) -> bool:
        return self.address <= address < self.address + len(self.memory)

    def written(self) -> np.ndarray:
        """Which pages were written here, as booleans."""
        pages = len(self.memory) // PAGE
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            pagemap.seek(8 * (self.address // PAGE))
            entries = np.frombuffer(pagemap.read(8 * pages), np.uint64)
        return ((entries & _PRESENT_OR_SWAPPED) != 0) & ((entries & _OF_FILE) == 0)

    def renew(self, pages: np.ndarray) -> None:
        """Show the common copy in `pages`, some of those that were written, as booleans."""
        if not pages.any():
            self._times_written = 0
            return
        self._times_written += 1
        copies = 1 < self._times_written < _COPIED_TIMES
        if not copies:
            self._times_written = 1
        for first, end in _runs(pages):
            if copies:
                self.memory[first:end] = self._shared[first:end]
            else:
                shared_memory.forget_written(self.memory[first:end])

    def detach(self, first: int, end: int) -> None:
        """Make the pages from `first` to before `end` this view's own, so that they stay as they are."""
        self.memory[first:end:PAGE] |= 0


class CommonMemory:
    """One copy of whole pages, zeros at first, that ranks of a node have in common.

    Attributes:
        shared: the copy. A rank writes its slice only, while nobody reads.
        first, end: the bounds of this rank's slice, in bytes: whole pages.
        contributions: by rank, memory for what is summed into the copy; empty where nothing is.
        contribution: this rank's memory of these.
    """

    def __init__(
        self,
        descriptor: int,
        nbytes: int,
        bounds: tuple[int, int],
        contributions: Sequence[np.ndarray],
        blocks: Blocks,
        across: Callable[[Array], None] | None,
    ) -> None:
        self.first, self.end = bounds
        self.shared = shared_memory.mapped(descriptor, nbytes, counted=self.end - self.first)
        self.contributions = contributions
        self._blocks, self._across = blocks, across
        self.contribution = contributions[blocks.rank] if contributions else None
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor).atexit = False

    @staticmethod
    def make(
        nbytes: int,
        bounds: tuple[int, int],
        blocks: Blocks,
        all_gather_object: Callable[[Any], list[Any]],
        *,
        summed: bool,
        across: Callable[[Array], None] | None = None,
    ) -> tuple[CommonMemory | None, str]:
        """Make it; None, and why, on all ranks where they cannot. Collective over ranks of a node.

        Args:
            bounds: of this rank's slice.
            blocks: where the ranks meet.
            summed: with memory for contributions.
            across: combines, in place, this rank's slice with those of other nodes; None where there are none.
        """
        rank = blocks.rank
        contributions: list[np.ndarray] = []
        if summed:
            segments, why = shared_memory.share(nbytes, rank, all_gather_object, populate=False)
            if segments is None:
                return None, why
            contributions = segments
        memory = None
        descriptor, why = (
            shared_memory.new_file(nbytes, rank, populate=False) if rank == 0 else (-1, "")
        )
        pid, number, failure = all_gather_object((os.getpid(), descriptor, why))[0]
        try:
            if not failure:
                if rank != 0:
                    descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
                memory = CommonMemory(descriptor, nbytes, bounds, contributions, blocks, across)
                why = memory._try()
        except (OSError, ValueError) as error:
            why = (
                f"rank {rank} could not map shared memory, or not read its own page tables: {error}"
            )
        # All have opened the file before rank 0 may close it.
        failure = shared_memory.first_failure(all_gather_object(why))
        if failure and memory is None and descriptor >= 0:
            os.close(descriptor)
        return (None, failure) if failure else (memory, "")

    def _try(self) -> str:
        """Try what views rely on. Returns: what does not work, "" if all does. The memory stays as it was."""
        view = self.view()
        place = self.first if self.first < self.end else 0
        before = view.memory[place]
        seen = True
        if self.first < self.end:
            self.shared[place] = 1
            seen = before == 0 and view.memory[place] == 1
            self.shared[place] = 0
        if view.written().any():
            return "the kernel does not tell which pages are a mapping's own"
        view.memory[place] = 2
        if np.flatnonzero(view.written()).tolist() != [place // PAGE]:
            return "the kernel does not tell which pages were written"
        return "" if seen else "private mappings of a file do not show what is written to it"

    def view(self) -> View:
        memory = shared_memory.mapped(self._descriptor, len(self.shared), private=True)
        return View(memory, self.shared)

    def publish(self, view: View, pages: np.ndarray) -> None:
        """Copy `pages` of this rank's view to its slice. Nobody may read meanwhile."""
        for first, end in _runs(pages):
            first, end = max(first, self.first), min(end, self.end)
            if first < end:
                self.shared[first:end] = view.memory[first:end]

    def sum(self, parts: Sequence[ByteRange], view: View, factor: float | None) -> None:
        """Sum all contributions to `parts`, times `factor`, into the copy. Collective; each rank sums in its slice.

        `view` shows it once it is renewed.
        """
        with self._blocks.unbroken:
            self._blocks.tick()  # all contributions are there, and nobody reads the last sum
            for part in parts:
                first, end = max(part.first, self.first), min(part.end, self.end)
                if first < end:
                    self._sum(part, first, end, view, factor)
            self._blocks.tick()  # all slices are there, and nobody reads contributions

    def _sum(self, part: ByteRange, first: int, end: int, view: View, factor: float | None) -> None:
        how = arithmetic_of(part.like.dtype, "sum")
        pieces = [how.view(memory[first:end]) for memory in self.contributions]
        out, before = how.view(self.shared[first:end]), how.view(view.memory[first:end])
        chunk = _CHUNK // how.itemsize
        chunks = [slice(start, start + chunk) for start in range(0, len(out), chunk)]
        if self._across is None:
            # The operand of an addition may lie where the sum goes: a view shows pages of the copy.
            sums = how.view(np.empty(min(_CHUNK, end - first), np.uint8))
            for here in chunks:
                total = sums[: len(out[here])] if part.added else out[here]
                how.combine([piece[here] for piece in pieces], total, factor)
                if part.added:
                    how.combine([before[here], total], out[here], None)
            return
        totals = how.totals(len(out))
        for here in chunks:
            how.combine([piece[here] for piece in pieces], totals[here], None)
        self._across(totals)
        scale(totals, factor)
        if part.added:
            with np.errstate(all="ignore"):
                totals += before
        out[:] = totals


def _runs(pages: np.ndarray) -> list[tuple[int, int]]:
    """Where consecutive pages of `pages`, booleans, begin and end, in bytes."""
    edges = np.flatnonzero(np.diff(pages.astype(np.int8), prepend=0, append=0)) * PAGE
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
