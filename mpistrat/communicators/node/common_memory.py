"""Common memory: the ranks of a node keep one copy of it, though each of them may write everywhere in it.

Every rank owns a slice, and only the owner changes the copy there. All ranks read the copy through views: mappings with
copy-on-write. A page that a rank writes in its view is private to the rank until it renews the view. So a program may
use such memory as its own, and a page that nobody writes exists once.

The kernel does this for a MAP_PRIVATE mapping of a file in memory: a page that this mapping has not written is the page
of the file, and shows the other ranks' writes. POSIX leaves that open, so `CommonMemory` tries it before it relies on
it. /proc/self/pagemap says which pages a mapping has written.
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
# Bytes that are combined completely before the next bytes, while they are in the caches.
_CHUNK = 1 << 18
# A view that is written before every renewal, as clipping writes gradients, keeps its pages, and the copy goes into
# them: dropping pages costs page faults, ten times as much. After this many renewals the view drops them once, in case
# the writing has stopped.
_COPIED_TIMES = 50

# Bits of a pagemap entry: a page in memory or swapped out, and a page of a file. See <linux/fs.h> and
# Documentation/admin-guide/mm/pagemap.rst.
_PRESENT_OR_SWAPPED, _OF_FILE = np.uint64(3 << 62), np.uint64(1 << 61)


class ByteRange(NamedTuple):
    """Bytes of a `CommonMemory` whose contributions are summed.

    Attributes:
        like: an array of the dtype of these bytes.
        first: the first byte.
        end: the byte after the last.
        added: whether the sum is added to the values in this rank's view; if False, it replaces them.
    """

    like: Array
    first: int
    end: int
    added: bool


class View:
    """A rank's mapping of a `CommonMemory`.

    Attributes:
        memory: the mapping's bytes. A page that this rank writes here is private to the rank until it is renewed.
        address: the address of the first byte.
    """

    def __init__(self, memory: np.ndarray, shared: np.ndarray) -> None:
        self.memory = memory
        self.address = int(memory.ctypes.data)
        self._shared = shared
        self._times_written = 0  # renewals in a row that had written pages to renew

    def holds(self, address: int) -> bool:
        return self.address <= address < self.address + len(self.memory)

    def written(self) -> np.ndarray:
        """Return a boolean for each page: whether the page is private to this rank, because the rank has written it."""
        pages = len(self.memory) // PAGE
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            pagemap.seek(8 * (self.address // PAGE))
            entries = np.frombuffer(pagemap.read(8 * pages), np.uint64)
        return ((entries & _PRESENT_OR_SWAPPED) != 0) & ((entries & _OF_FILE) == 0)

    def renew(self, pages: np.ndarray) -> None:
        """Show the common copy again in `pages`: drop these private pages, or copy the common copy into them.

        Args: pages: a boolean for each page; True only for pages that `written` reports.
        """
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
        """Make the pages from byte `first` to before byte `end` private, so that they keep their present values."""
        self.memory[first:end:PAGE] |= 0


class CommonMemory:
    """One copy of whole pages, zeros at first, that the ranks of a node share. Made by: `CommonMemory.make`.

    Attributes:
        shared: the copy, as bytes. A rank writes only to its slice, and only while no rank reads.
        first, end: the first byte of this rank's slice, and the byte after its last: whole pages.
        contributions: for each rank, memory for the values that it adds to sums; empty without sums.
        contribution: this rank's array of `contributions`; None without sums.
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
        """Make the memory, where the ranks can. Collective over the ranks of a node.

        Args:
            nbytes: bytes of whole pages.
            bounds: the first byte of this rank's slice, and the end.
            blocks: where the ranks meet.
            summed: whether the memory also has contributions to sum.
            across: combines this rank's slice with the same slice of other nodes, in place; None on a single node.

        Returns: the memory and ""; on all ranks None and the reason if any rank cannot make it.
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
            why = f"rank {rank} could not map shared memory, or could not read its page tables: {error}"
        # All ranks have opened the file by now, so rank 0 may close it.
        failure = shared_memory.first_failure(all_gather_object(why))
        if failure and memory is None and descriptor >= 0:
            os.close(descriptor)
        return (None, failure) if failure else (memory, "")

    def _try(self) -> str:
        """Try whether the kernel shows and reports written pages. The memory stays as it was.

        Returns: "" if all works, else words for the missing behaviour.
        """
        view = self.view()
        place = self.first if self.first < self.end else 0
        before = view.memory[place]
        seen = True
        if self.first < self.end:
            self.shared[place] = 1
            seen = before == 0 and view.memory[place] == 1
            self.shared[place] = 0
        if view.written().any():
            return "the kernel does not report a mapping's private pages"
        view.memory[place] = 2
        if np.flatnonzero(view.written()).tolist() != [place // PAGE]:
            return "the kernel does not report written pages"
        return "" if seen else "private mappings of a file do not show writes to the file"

    def view(self) -> View:
        memory = shared_memory.mapped(self._descriptor, len(self.shared), private=True)
        return View(memory, self.shared)

    def publish(self, view: View, pages: np.ndarray) -> None:
        """Copy `pages` of this rank's view to this rank's slice of the copy. No rank may read meanwhile."""
        for first, end in _runs(pages):
            first, end = max(first, self.first), min(end, self.end)
            if first < end:
                self.shared[first:end] = view.memory[first:end]

    def sum(self, parts: Sequence[ByteRange], view: View, factor: float | None) -> None:
        """Sum the contributions of all ranks to `parts`, times `factor`, into the copy. Collective.

        Each rank sums its own slice.

        Args:
            view: this rank's view. It shows the sum once it is renewed.
            factor: multiplies the sum; None for none.
        """
        with self._blocks.unbroken:
            self._blocks.tick()  # all contributions are written, and no rank reads the last sum any more
            for part in parts:
                first, end = max(part.first, self.first), min(part.end, self.end)
                if first < end:
                    self._sum(part, first, end, view, factor)
            self._blocks.tick()  # all slices are written, and no rank reads contributions any more

    def _sum(self, part: ByteRange, first: int, end: int, view: View, factor: float | None) -> None:
        how = arithmetic_of(part.like.dtype, "sum")
        pieces = [how.view(memory[first:end]) for memory in self.contributions]
        out, before = how.view(self.shared[first:end]), how.view(view.memory[first:end])
        chunk = _CHUNK // how.itemsize
        chunks = [slice(start, start + chunk) for start in range(0, len(out), chunk)]
        if self._across is None:
            # A page that the view has not written is the copy's: a sum in `out` would overwrite `before`.
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
    """Return for each run of True in `pages`, a boolean for each page, its first byte and the byte after its last."""
    edges = np.flatnonzero(np.diff(pages.astype(np.int8), prepend=0, append=0)) * PAGE
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
