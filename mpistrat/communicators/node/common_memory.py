"""`CommonMemory`: one copy of some memory for all ranks of a node; each rank may still write everywhere in its view.

Each rank owns a slice, and only the owner changes the common copy there. A rank reads the copy through a view: a
mapping with copy-on-write. If the rank writes a page in its view, the page becomes private to the rank until it renews
the view. So a program may use the view as ordinary memory, and a page that nobody writes exists once on the node.

The view is a MAP_PRIVATE mapping of a file in memory. On Linux, a page that this mapping has not written shows the
file, with the other ranks' writes. POSIX leaves that open, so `CommonMemory` tests it before it relies on it.
/proc/self/pagemap says which pages a mapping has written.
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
# Some programs write a view before every renewal, such as gradients that they clip. Such a view keeps its private
# pages, and the common copy is copied into them, because dropping pages costs page faults, ten times as much time.
# After this many renewals the view drops the pages once, in case the program writes no more.
_COPIED_TIMES = 50

# Bits of a pagemap entry: a page in memory or swapped out, and a page of a file. See <linux/fs.h> and
# Documentation/admin-guide/mm/pagemap.rst.
_PRESENT_OR_SWAPPED = np.uint64(3 << 62)
_OF_FILE = np.uint64(1 << 61)


class ByteRange(NamedTuple):
    """A part of a `CommonMemory` for `CommonMemory.sum`: the bytes that get the sum of the ranks' contributions.

    Attributes:
        like: an array with the dtype of the values in these bytes.
        first: the index of the first byte.
        end: the index after the last byte.
        added: True: the copy becomes the values in this rank's view plus the sum; False: the sum alone.
    """

    like: Array
    first: int
    end: int
    added: bool


class View:
    """A rank's mapping of a `CommonMemory`. The rank may write it without changing the common copy.

    Attributes:
        memory: the mapping's bytes. A page that this rank writes here is private to the rank until `renew`.
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
        """Return a boolean for each page: True if this rank has written it, so it no longer shows the common copy."""
        pages = len(self.memory) // PAGE
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            pagemap.seek(8 * (self.address // PAGE))
            entries = np.frombuffer(pagemap.read(8 * pages), np.uint64)
        return ((entries & _PRESENT_OR_SWAPPED) != 0) & ((entries & _OF_FILE) == 0)

    def renew(self, pages: np.ndarray) -> None:
        """Let `pages` have the values of the common copy again: drop the private pages, or copy the values into them.

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
        """Make the pages from byte `first` to byte `end` - 1 private: they keep their values when the copy changes."""
        self.memory[first:end:PAGE] |= 0


class CommonMemory:
    """One copy of some memory, shared by the ranks of a node: whole pages, zeros at first. Made by: `make`.

    Attributes:
        shared: the common copy, as bytes. A rank writes only to its slice, and only while no rank reads.
        first, end: the index of the first byte of this rank's slice, and the index after its last: whole pages.
        contributions: for each rank, in rank order, the memory (as long as the copy) for the values
            that `sum` adds up; empty if made with `summed=False`.
        contribution: this rank's entry of `contributions`; None if made with `summed=False`.
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
        self._blocks = blocks
        self._across = across
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
        """Make the memory, or return the reason why a rank cannot. Collective over the ranks of a node.

        Args:
            nbytes: bytes of whole pages.
            bounds: the index of the first byte of this rank's slice, and the index after its last.
            blocks: lets the node's ranks wait for each other (`tick`).
            summed: whether to make `contributions`, for `sum`.
            across: sums an array, this rank's slice, over the nodes, in place; None on a single node.

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
        descriptor = -1
        why = ""
        if rank == 0:
            descriptor, why = shared_memory.new_file(nbytes, rank, populate=False)
        files = all_gather_object((os.getpid(), descriptor, why))
        pid, number, failure = files[0]
        try:
            if not failure:
                if rank != 0:
                    path = f"/proc/{pid}/fd/{number}"
                    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                memory = CommonMemory(descriptor, nbytes, bounds, contributions, blocks, across)
                why = memory._try()
        except (OSError, ValueError) as error:
            why = f"rank {rank} could not map shared memory, or could not read its page tables: {error}"
        # All ranks have opened the file by now, so rank 0 may close it.
        failure = shared_memory.first_failure(all_gather_object(why))
        if failure and memory is None and descriptor >= 0:
            os.close(descriptor)
        if failure:
            return None, failure
        return memory, ""

    def _try(self) -> str:
        """Test that views show writes to the copy, and that the kernel reports the pages that a view has written.

        The copy keeps its values.

        Returns: "" if both work, else words for the missing behaviour.
        """
        view = self.view()
        place = 0
        seen = True
        if self.first < self.end:
            place = self.first
            before = view.memory[place]
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
        """Copy `pages` (a boolean for each) from this rank's view into this rank's slice of the common copy.

        Pages outside the slice stay as they are. No rank may read the copy meanwhile.
        """
        for first, end in _runs(pages):
            first = max(first, self.first)
            end = min(end, self.end)
            if first < end:
                self.shared[first:end] = view.memory[first:end]

    def sum(self, parts: Sequence[ByteRange], view: View, factor: float | None) -> None:
        """Sum the ranks' contributions in some ranges of bytes, and write the sums into the common copy. Collective.

        Each rank sums its own slice. When the call returns, all slices are written.

        Args:
            parts: the ranges of bytes to sum.
            view: this rank's copy-on-write mapping of the common copy. Pages that the rank has written there are
                private, and show the sum only after `View.renew`.
            factor: multiplies the sum; None: the sum as it is.
        """
        with self._blocks.unbroken:
            self._blocks.tick()  # all contributions are written, and no rank reads the last sum any more
            for part in parts:
                first = max(part.first, self.first)
                end = min(part.end, self.end)
                if first < end:
                    self._sum(part, first, end, view, factor)
            self._blocks.tick()  # all slices are written, and no rank reads contributions any more

    def _sum(self, part: ByteRange, first: int, end: int, view: View, factor: float | None) -> None:
        how = arithmetic_of(part.like.dtype, "sum")
        pieces = [how.view(memory[first:end]) for memory in self.contributions]
        out = how.view(self.shared[first:end])
        before = how.view(view.memory[first:end])
        chunk = _CHUNK // how.itemsize
        chunks = [slice(start, start + chunk) for start in range(0, len(out), chunk)]
        if self._across is None:
            # A page that the view has not written shows the copy, so a sum written to `out` would overwrite `before`.
            sums = how.view(np.empty(min(_CHUNK, end - first), np.uint8))
            for here in chunks:
                target = out[here]
                total = sums[: len(target)] if part.added else target
                how.combine([piece[here] for piece in pieces], total, factor)
                if part.added:
                    how.combine([before[here], total], target, None)
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


def _runs(pages: np.ndarray) -> list[list[int]]:
    """Return [first byte, byte after the last] of each group of consecutive pages that are True in `pages`."""
    changes = np.diff(pages.astype(np.int8), prepend=0, append=0)
    edges = np.flatnonzero(changes) * PAGE
    return edges.reshape(-1, 2).tolist()
