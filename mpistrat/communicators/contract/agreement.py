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

# How often a rank reads another rank's word before it calls `wait_until`: for 4 us. Most ranks arrive in this time.
_READS_BEFORE_WAITING = 100


class CallAgreement(abc.ABC):
    """How the ranks of a communicator find out, before each call, whether all are about to make the same call."""

    @abc.abstractmethod
    def agree(self, calls: int, digest: int) -> bool:
        """Wait until all ranks have entered the call. Return whether all passed the same `digest`.

        Called by: `Contract.enter`, on every rank.

        Args:
            calls: the number of this call in the communicator; equal on all ranks.
            digest: this rank's hash of its call (operation, dtype, shape, label), `DIGEST_BITS` bits.

        Raises: StallError or RankLostError if a rank does not come.
        """


class SharedMemoryAgreement(CallAgreement):
    """The agreement of ranks on one node: each rank writes an 8-byte word to shared memory, and reads all other words.

    A word has the digest, and the last 8 bits of the call's number. If a rank has written the word of the next call
    already, it counts as equal, because that rank has seen that all ranks agreed on this call. No rank is further
    ahead, because it waits in the next call for this rank's word.

    When the ranks have agreed, each rank can read what other ranks wrote to shared memory before the call. A rank may
    overwrite it when they have agreed on the next call.

    Args:
        watch: this rank's record, in shared memory, of its calls, and the records of its peers; the words lie there.
        fence: a function that orders memory accesses before it and after it; None where the processor does so itself.
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
        """Wait until another rank has entered call `number`. Return whether it makes the same call as this rank.

        Args:
            words: the other rank's record.
            position: the index of the other rank's word in `words`.
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
    """The agreement of ranks on several nodes: one nonblocking all-reduce of 16 bytes over MPI.

    Each rank gives (h, -h), where h is the digest (hash) of its call, and MAX gives (largest h, -smallest h). The
    digests are equal exactly if the two numbers add up to 0.
    """

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
