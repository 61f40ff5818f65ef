"""Agreement: before bytes move, the ranks find out whether all are about to make the same call."""

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

# How often a rank reads another rank's word before it sleeps: for 4 us. A rank that keeps step arrives in this time.
_READS_BEFORE_WAITING = 100


class CallAgreement(abc.ABC):
    @abc.abstractmethod
    def agree(self, calls: int, digest: int) -> bool:
        """Wait until all ranks have entered the call. Return whether they have the same digest.

        Args:
            calls: the number of this call in the communicator; equal on all ranks.
            digest: this rank's hash of the call, `DIGEST_BITS` bits.
        """


class SharedMemoryAgreement(CallAgreement):
    """Ranks agree through shared memory: each writes one word and reads all other words.

    A word has the digest, and the last 8 bits of the call's number.

    A word of the next call counts as equal: its rank has seen that all ranks agreed on this call. No word is further
    ahead, because its rank waits in the next call until this rank has written.

    Once the ranks have agreed, each can read everything that another wrote to shared memory before. A rank may write
    there again once they agree on the next call.

    Args:
        watch: this rank's record and the records of its peers.
        fence: orders the memory accesses before it and after it; None where the processor does so.
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
        """Wait until a rank has entered call `number`. Return whether it made the same call.

        Args:
            words: the rank's record.
            position: the index of the rank's word in `words`.
            number: the low 8 bits of the call's number.
            word: this rank's word.
        """
        following = (number + 1) & 0xFF

        def arrived() -> bool:
            return words[position] & 0xFF in (number, following)

        if not arrived():
            wait_until(arrived, self._watch)
        found = words[position]
        return found == word or found & 0xFF == following


class MessageAgreement(CallAgreement):
    """Ranks agree by a 16-byte MAX of (h, -h) over MPI: the digests h are equal exactly if the two halves cancel."""

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
