"""How ranks find out, before bytes move, whether all are about to make the same call."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from mpistrat.communicators.node.shared_memory import FENCE
from mpistrat.liveness.records.record import WORD
from mpistrat.liveness.records.watch import CommunicatorWatch
from mpistrat.liveness.waiting import wait_until

if TYPE_CHECKING:
    from mpistrat.communicators.transports.mpi import MpiTransport

# How often a rank reads another's word before it begins to wait: for 4 us, in which ranks that keep step come.
_READS_BEFORE_WAITING = 100


class CallAgreement(abc.ABC):
    @abc.abstractmethod
    def agree(self, calls: int, digest: int) -> bool:
        """Whether all ranks have the same `digest` of their `calls`-th call. Waits until all have entered it."""


class SharedMemoryAgreement(CallAgreement):
    """Each rank writes one word, its digest and the last 8 bits of the call's number, and reads the others'.

    A word of the next call is as good as an equal one: its rank has seen that all agreed on our call. It cannot be
    further ahead, for it waits there until we have written.

    When the ranks have agreed, they can read what a rank wrote to shared memory before; it may write there again when
    they agree on the next call.

    Args:
        fence: orders memory accesses before it and after it; None where the processor does so.
    """

    def __init__(self, watch: CommunicatorWatch, fence: Callable[[], None] | None = FENCE) -> None:
        self._watch, self._fence = watch, fence
        self._words = watch.record.words
        self._position = watch.slot + WORD
        self._peers = [(words, slot + WORD) for words, slot in watch.peers or ()]
        self._reads = range(1 if watch.crowded else _READS_BEFORE_WAITING)

    def agree(self, calls: int, digest: int) -> bool:
        number = calls & 0xFF
        word = digest << 8 | number
        if self._fence is not None:
            self._fence()
        self._words[self._position] = word
        equal = True
        for words, position in self._peers:
            for _ in self._reads:
                if words[position] == word:
                    break
            else:
                equal = self.wait_for(words, position, number, word) and equal
        if self._fence is not None:
            self._fence()
        return equal

    def wait_for(self, words: memoryview, position: int, number: int, word: int) -> bool:
        """Wait until a rank has entered the call `number`. Returns: whether it has the same `word`, at `position`."""
        following = (number + 1) & 0xFF

        def arrived() -> bool:
            return words[position] & 0xFF in (number, following)

        if not arrived():
            wait_until(arrived, self._watch)
        found = words[position]
        return found == word or found & 0xFF == following


class MessageAgreement(CallAgreement):
    """A 16-byte MAX of (h, -h): the digests are equal on all ranks exactly if both halves cancel."""

    def __init__(self, mpi: MpiTransport, watch: CommunicatorWatch) -> None:
        self._mpi = mpi
        self._pair = np.empty(2, np.int64)
        self._watch = watch

    def agree(self, calls: int, digest: int) -> bool:
        pair = self._pair
        pair[0] = digest
        pair[1] = -digest
        arrived = self._mpi.start_all_reduce(pair, "max")
        if not arrived():
            wait_until(arrived, self._watch)
        return bool(pair[0] + pair[1] == 0)
