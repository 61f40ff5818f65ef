"""Agreement: before bytes move, the ranks find out whether all are about to make the same call."""

from __future__ import annotations

import abc
import contextlib
import os
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from mpistrat.communicators.contract.call_signature import DIGEST_BITS, LINE_BITS
from mpistrat.communicators.contract.left_out_calls import find_left_out
from mpistrat.communicators.node.shared_memory import FENCE
from mpistrat.liveness.records.job_folder import record_of
from mpistrat.liveness.records.record import CALLS, RANK, WORD, RankRecord
from mpistrat.liveness.records.watch import CommunicatorWatch
from mpistrat.liveness.waiting import wait_until
from mpistrat.machine.notices import tell
from mpistrat.machine.private_files import private

if TYPE_CHECKING:
    from mpistrat.communicators.transports.mpi import MpiTransport

# How often a rank reads another rank's word before it calls `wait_until`: for 4 us. Most ranks arrive in this time.
_READS_BEFORE_WAITING = 100
# How often the last calls of two ranks are compared because the ranks call at the same two lines.
_COMPARISONS_OF_LINES = 4
_NUMBER_BITS = 8
_DIGEST = (1 << DIGEST_BITS) - 1  # the bits of a stamp that are equal in equal calls
_LINE_FROM = DIGEST_BITS + _NUMBER_BITS  # the first bit of a word that belongs to the line
_SAME_CALL = (1 << _LINE_FROM) - 1  # the bits of a word that are equal in equal calls
_LINE = (1 << LINE_BITS) - 1  # the bits of the line in the numbers of a message


class CallAgreement(abc.ABC):
    """How the ranks of a communicator find out, before each call, whether all are about to make the same call.

    They also see whether they make the call on the same line of the program. Different lines are right, unless a rank
    has left out a call; then one rank gives a notice, and each rank that knows it sets `left_out` of its watch.
    """

    def __init__(self, watch: CommunicatorWatch) -> None:
        self._watch = watch
        self._compared: Counter[tuple[int, ...]] = Counter()

    @abc.abstractmethod
    def agree(self, calls: int, stamp: int) -> bool:
        """Wait until all ranks have entered the call. Return whether all make the same call, on whatever line.

        Called by: `Contract.enter`, on every rank.

        Args:
            calls: the number of this call in the communicator; equal on all ranks.
            stamp: this rank's hash of its call (operation, dtype, shape, label), of `DIGEST_BITS` bits, and above it a
                hash of the line of the program that makes the call, of `LINE_BITS` bits.

        Raises: StallError or RankLostError if a rank does not come.
        """

    def _compares(self, *lines: int) -> bool:
        """Whether to compare the last calls of ranks that make a call at the lines with these two hashes."""
        self._compared[lines] += 1
        return self._compared[lines] <= _COMPARISONS_OF_LINES


class SharedMemoryAgreement(CallAgreement):
    """The agreement of ranks on one node: each rank writes an 8-byte word to shared memory, and reads all other words.

    A word has the stamp, and the last 8 bits of the call's number. If a rank has written the word of the next call
    already, it counts as equal, because that rank has seen that all ranks agreed on this call. No rank is further
    ahead, because it waits in the next call for this rank's word.

    When the ranks have agreed, each rank can read what other ranks wrote to shared memory before the call. A rank may
    overwrite it when they have agreed on the next call.

    Args:
        watch: this rank's record, in shared memory, of its calls, and the records of its peers; the words lie there.
        fence: a function that orders memory accesses before it and after it; None where the processor does so itself.
    """

    def __init__(self, watch: CommunicatorWatch, fence: Callable[[], None] | None = FENCE) -> None:
        super().__init__(watch)
        self._fence = fence
        self._words = watch.record.words
        self._position = watch.slot + WORD
        peers = watch.peers or ()
        self._peers = [(words, slot + WORD) for words, slot in peers]
        self._reads = range(1 if watch.crowded else _READS_BEFORE_WAITING)

    def agree(self, calls: int, stamp: int) -> bool:
        number = calls & 0xFF
        word = stamp << _NUMBER_BITS | number
        if self._fence is not None:
            self._fence()
        self._words[self._position] = word
        equal = True
        for words, position in self._peers:
            for _ in self._reads:
                found = words[position]
                if found == word or found & 0xFF == number:
                    break
            else:
                found = self.wait_for(words, position, number)
            if found != word:
                equal = self._is_same(words, position, word, found) and equal
        if self._fence is not None:
            self._fence()
        return equal

    def wait_for(self, words: memoryview, position: int, number: int) -> int:
        """Wait until another rank has entered call `number`. Return that rank's word.

        Args:
            words: the other rank's record.
            position: the index of the other rank's word in `words`.
            number: the low 8 bits of the call's number.
        """
        following = (number + 1) & 0xFF

        def arrived() -> bool:
            return words[position] & 0xFF in (number, following)

        if not arrived():
            wait_until(arrived, self._watch)
        return words[position]

    def _is_same(self, words: memoryview, position: int, word: int, found: int) -> bool:
        """Whether another rank makes the same call as this rank, or has seen that it does.

        If the ranks call at different lines, and one of them has left out a call, this gives a notice of it.

        Args:
            words: the other rank's record.
            position: the index of the other rank's word in `words`.
            word, found: the words of this rank and of the other rank; they differ.
        """
        differing = word ^ found
        if differing & 0xFF:
            return True  # the other rank is one call ahead
        if differing & _SAME_CALL:
            return False
        if self._compares(word >> _LINE_FROM, found >> _LINE_FROM):
            own = self._watch.record
            slot = self._watch.slot
            number = own.words[slot + CALLS]
            with contextlib.suppress(OSError):  # no common folder, or another rank has told it
                other = RankRecord(record_of(own.folder, words[RANK]))
                own_lines = own.lines_on(slot, number)
                other_lines = other.lines_on(position - WORD, number)
                if find_left_out(self._watch, own_lines, other_lines):
                    path = os.path.join(own.folder, "left-out")
                    with open(path, "x", opener=private):
                        tell(self._watch.left_out)
        return True


class MessageAgreement(CallAgreement):
    """The agreement of ranks on several nodes: one nonblocking all-reduce of 16 bytes over MPI.

    Each rank gives (h, -h), where h is the hash of its call, followed by the bits of the hash of its line. MAX gives
    (largest h, -smallest h). All hashes are equal exactly if the two numbers add up to 0.
    """

    def __init__(self, mpi: MpiTransport, watch: CommunicatorWatch) -> None:
        super().__init__(watch)
        self._mpi = mpi
        self._pair = np.empty(2, np.int64)

    def agree(self, calls: int, stamp: int) -> bool:
        pair = self._pair
        hashed = (stamp & _DIGEST) << LINE_BITS | stamp >> DIGEST_BITS
        pair[0] = hashed
        pair[1] = -hashed
        arrived = self._mpi.start_max(pair)
        if not arrived():
            wait_until(arrived, self._watch)
        if pair[0] + pair[1] == 0:
            return True
        largest = int(pair[0])
        smallest = -int(pair[1])
        if largest >> LINE_BITS != smallest >> LINE_BITS:
            return False
        if self._compares(largest & _LINE, smallest & _LINE):  # all ranks have counted the same
            record = self._watch.record
            slot = self._watch.slot
            lines = record.lines_on(slot, record.words[slot + CALLS])
            first, *others = self._mpi.comm.allgather(lines)
            for other in others:
                if find_left_out(self._watch, first, other) and self._mpi.rank == 0:
                    tell(self._watch.left_out)
        return True
