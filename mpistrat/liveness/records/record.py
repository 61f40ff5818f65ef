"""A rank's record: a file in shared memory with its process, the collective that it is in, and its last 64 collectives.

The file outlives its process, so other processes can read the last collective of a stopped or dead rank. A word has 8
bytes, is aligned, and has the machine's byte order. So a reader sees the old or the new word, never a mixture. Times
are CLOCK_MONOTONIC in ns. A slot has the rank's last collective on one communicator; the ring has the rank's last 64
collectives on all communicators.

    0      header, see the constants below
    1024   host name, UTF-8, ends at a zero byte
    1280   how the rank's program ended, UTF-8, ends at a zero byte
    3072   64 sums of ns spent waiting, by second (modulo 64); at 3584 the seconds that they belong to
    4096   256 slots of 64 bytes, one for each communicator
    20480  64 ring entries of 256 bytes
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import time
from dataclasses import dataclass

from mpistrat.liveness import deadlines
from mpistrat.liveness.processes import began_at

MAGIC = 0x31_74_72_74_73_69_70_6D  # "mpistrt1"
# Header words
(
    VERSION,
    PID,
    RANK,
    SIZE,
    STACK_SIGNAL,
    STATE,
    ABORT,
    CODE,  # the exit code to end with; written before ABORT
    ENTRIES,
    SLOTS,
    LIMIT,
    ON_STALL,
    STALLED,  # with ABORT: the hash of the stalled communicator's name; written before ABORT
    LOOKED,  # when the observer last looked, or will look at the latest; 0: never yet
    ASK,  # 1: the observer asks for accounts of the ranks on other nodes; see `other_nodes`
    ASKED,  # when the observer of another node last asked this node
    EXPENDABLE,  # 1: if this rank dies, the others go on without it
    OBSERVER,  # the pid of the process that observes this rank
    SAY,  # 1: the observer is to print the text that the rank has left in the job's folder
    STARTING,  # since when the rank waits for all ranks to start; 0: it does not wait
    EXITS,  # ANNOUNCED or SEEN if the rank is about to end by os._exit(0); else 0
    LIMIT_IS_SET,  # 1: the user has chosen LIMIT; 0: the timeout of a group takes its place
    NOTICED,  # the ring entry of this rank's last call that was reported after its timeout
    BEGAN,  # when the process began, by `began_at`: another process may get its pid later
) = range(24)
# STATE. LEAVING: this rank's program has ended, and the rank waits until the programs of the other ranks have ended.
# LEFT: this wait is over, or there was none. ENDING: this rank ends the job, or has failed, so that the observer need
# not explain its death.
RUNNING, LEAVING, LEFT, ENDING = range(4)
# EXITS. The rank sets ANNOUNCED; the observer then sets SEEN.
ANNOUNCED = 1
SEEN = 2
# The values of ON_STALL, and of ABORT after a report (0 before). END: the job ends because of a stall, a death or an
# absent rank. RAISE: the ranks raise StallError.
END = 1
RAISE = 2
# Words of a slot: a word that stands for the rank's last call (see `agreement`), the call's number, when the rank
# entered it (0: it has returned), the communicator's size, the hash of the communicator's name, the number in the job
# of its rank 0, the number of the call's entry in the ring, and the ns after which the rank itself raises an error
# (0: never).
WORD, CALLS, SINCE, GROUP_SIZE, GROUP, FIRST, ENTRY, TIMEOUT = range(8)

WAITED = 3072 // 8
_WAITED_SECOND = 3584 // 8
_FIRST_SLOT = 4096 // 8
_SLOT_WORDS = 8
MAX_SLOTS = 256
_FIRST_ENTRY = 4096 + 64 * MAX_SLOTS
_ENTRY_BYTES = 256
RING = 64
BYTES = _FIRST_ENTRY + RING * _ENTRY_BYTES

# Number, entered, waited, slot, bytes of the call, bytes of its site; then the text, filled up with zeros.
_TEXT_BYTES = _ENTRY_BYTES - struct.calcsize("=QqqIHH")
_ENTRY = struct.Struct(f"=QqqIHH{_TEXT_BYTES}s")
_FIRST_WAITED = (_FIRST_ENTRY + 16) // 8
_ENTRY_WORDS = _ENTRY_BYTES // 8
MAX_SITE = 110


class _Word:
    """A descriptor: makes the word `index` of the header an int attribute of `RankRecord`."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __get__(self, record: RankRecord, owner: type[RankRecord] | None = None) -> int:
        return record.words[self._index]

    def __set__(self, record: RankRecord, value: int) -> None:
        record.words[self._index] = value


class _HeaderText:
    """A descriptor: makes `size` bytes of the header, from byte `first` on, a str attribute of `RankRecord`.

    The attribute is "" before it is set. A text that is too long loses its end.
    """

    def __init__(self, first: int, size: int) -> None:
        self._first = first
        self._size = size

    def __get__(self, record: RankRecord, owner: type[RankRecord] | None = None) -> str:
        written = record.map[self._first : self._first + self._size]
        return written.split(b"\0", 1)[0].decode(errors="replace")

    def __set__(self, record: RankRecord, value: str) -> None:
        encoded = value.encode(errors="replace")[: self._size - 1] + b"\0"
        record.map[self._first : self._first + len(encoded)] = encoded


class RankRecord:
    """A rank's record: its process, and the collectives that it is in, see the top of this file.

    The rank itself writes the record. The node's observer and other ranks map the same file, and read it. The observer
    also writes its orders to the rank there: ABORT, ASK, CODE and others.

    Args:
        path: the record's file; None: memory that no other process sees.
        create: make the file; OSError if it exists. False: map a file that exists.
    Attributes:
        map: the mapped bytes.
        words: the same memory as unsigned 64-bit words.
    Raises: OSError if the file cannot be made or mapped, or if it is no record of this version; ValueError if the file
        is still empty.
    """

    pid = _Word(PID)
    rank = _Word(RANK)
    size = _Word(SIZE)
    stack_signal = _Word(STACK_SIGNAL)
    state = _Word(STATE)
    expendable = _Word(EXPENDABLE)
    abort = _Word(ABORT)
    code = _Word(CODE)
    on_stall = _Word(ON_STALL)
    stalled = _Word(STALLED)
    looked = _Word(LOOKED)
    ask = _Word(ASK)
    asked = _Word(ASKED)
    observer = _Word(OBSERVER)
    say = _Word(SAY)
    starting = _Word(STARTING)
    exits = _Word(EXITS)
    limit_is_set = _Word(LIMIT_IS_SET)
    noticed = _Word(NOTICED)
    began = _Word(BEGAN)
    host = _HeaderText(1024, 256)
    end = _HeaderText(1280, 512)  # how the rank came to its end, as `ProgramExit.how`

    def __init__(self, path: str | None, *, create: bool = False) -> None:
        self.path = path
        if path is None:
            self.map = mmap.mmap(-1, BYTES)
        else:
            creates = os.O_CREAT | os.O_EXCL if create else 0
            file = os.open(path, os.O_RDWR | creates, 0o600)
            try:
                if create:
                    os.posix_fallocate(file, 0, BYTES)  # else a full /dev/shm causes a SIGBUS later
                self.map = mmap.mmap(file, BYTES)
            except OSError:
                if create:
                    os.unlink(path)  # a reader would take the file for a record
                raise
            finally:
                os.close(file)
        self.words = memoryview(self.map).cast("Q")
        # Numbers of ring entries; threads may take them at the same time.
        self._numbers = itertools.count(1)
        if not create and path is not None and self.words[VERSION] != MAGIC:
            raise OSError(f"{path} is not a record of this version")

    def start(
        self,
        rank: int,
        size: int,
        host: str,
        limit: float = 0.0,
        on_stall: int = END,
        *,
        limit_is_set: bool = False,
    ) -> None:
        """Write this process, its rank and its limits into the header; afterwards other processes may map the record.

        Args:
            host: the node's name, for messages.
            limit: seconds that a collective may last; 0: no limit.
            on_stall: END or RAISE, by MPISTRAT_ON_STALL.
            limit_is_set: whether the user has set MPISTRAT_STALL_SECONDS.
        Called by: the rank at its start, and again when it makes its first communicator.
        """
        self.pid = os.getpid()
        self.rank = rank
        self.size = size
        self.began = began_at(self.pid)
        self.words[LIMIT] = int(limit * 1e9)
        self.on_stall = on_stall
        self.limit_is_set = int(limit_is_set)
        self.host = host
        self.words[VERSION] = MAGIC

    def new_slot(self, name_hash: int, size: int, first: int = 0) -> int | None:
        """Take the next free slot, for this rank's calls on a new communicator. Slots are never given back.

        Args:
            name_hash: the hash of the communicator's name.
            size: number of the communicator's ranks.
            first: the number in the job of the communicator's rank 0.
        Returns: the index of the slot's first word in `words`; None if all 256 slots are taken.
        """
        number = self.words[SLOTS]
        if number == MAX_SLOTS:
            return None
        slot: int = _FIRST_SLOT + number * _SLOT_WORDS
        self.words[slot + GROUP_SIZE] = size
        self.words[slot + GROUP] = name_hash
        self.words[slot + FIRST] = first
        self.words[SLOTS] = number + 1
        return slot

    def enter(self, slot: int, calls: int, text: bytes, call_bytes: int) -> None:
        """Record that this rank enters collective number `calls` of the communicator with the slot `slot`.

        Called by: the communicator's contract, in each collective. The rank is inside until the slot's word SINCE is 0.

        Args: text, call_bytes: the result of `text_of`: the call and its site, and the bytes of the call.
        """
        words = self.words
        number = next(self._numbers)
        offset = _FIRST_ENTRY + number % RING * _ENTRY_BYTES
        now = time.monotonic_ns()
        site_bytes = len(text) - call_bytes
        _ENTRY.pack_into(self.map, offset, calls, now, -1, slot, call_bytes, site_bytes, text)
        words[ENTRIES] = words[slot + ENTRY] = number
        words[slot + CALLS] = calls
        words[slot + SINCE] = now

    def waited(self, slot: int) -> None:
        """Record how long this rank has waited for other ranks in its last collective on `slot`: until now.

        Called by: the contract, once all ranks have entered the collective.
        """
        words = self.words
        now = time.monotonic_ns()
        nanoseconds = now - words[slot + SINCE]
        place = words[slot + ENTRY] % RING
        words[_FIRST_WAITED + place * _ENTRY_WORDS] = nanoseconds
        second = now // 1_000_000_000
        bucket = second % RING
        if words[_WAITED_SECOND + bucket] != second:
            words[WAITED + bucket] = 0
            words[_WAITED_SECOND + bucket] = second
        words[WAITED + bucket] += nanoseconds

    def seconds_waited(self, last: int = 60) -> float:
        """Return the seconds that this rank waited for other ranks to enter collectives, summed over all waits.

        Waits that have ended count in full, also the part before the last `last` seconds. A wait that still lasts
        counts as at most `last` seconds.

        Args: last: count waits that ended in the last so many seconds, at most 63, and the longest wait that still
            lasts.
        """
        now = time.monotonic_ns()
        waited = self.words[WAITED : WAITED + RING]
        seconds = self.words[_WAITED_SECOND : _WAITED_SECOND + RING]
        oldest = now // 1_000_000_000 - last
        by_second = zip(waited, seconds, strict=True)
        ended = sum(nanoseconds for nanoseconds, second in by_second if second >= oldest)
        longest = 0
        for slot in self.slots():
            entry = self.entry_of(slot)
            if slot.since and entry and entry.waited < 0:
                longest = max(longest, now - slot.since)
        present = min(longest, last * 1_000_000_000)
        return (ended + present) / 1e9

    @property
    def limit(self) -> float:
        """Seconds that a collective may last; 0: no limit."""
        return self.words[LIMIT] / 1e9

    def limit_of(self, timeout: float) -> float:
        """Return the seconds after which the observer reports a call on a communicator as a stall; 0: never.

        They are `limit` if the user has set MPISTRAT_STALL_SECONDS to more than 0, or if `timeout` is 0; else
        `timeout` + 15.

        Args: timeout: the communicator's timeout in seconds; 0: none.
        """
        if not timeout or (self.limit_is_set and self.limit):
            return self.limit
        return timeout + deadlines.OBSERVER_WAITS_FOR_ERRORS_AFTER_TIMEOUT

    @property
    def has_left(self) -> bool:
        """Whether the rank's program has ended, and the rank has not failed."""
        return self.state in (LEAVING, LEFT)

    @property
    def folder(self) -> str:
        """The path of the job's folder, with this record's file; "" if no other process sees the record."""
        return os.path.dirname(self.path or "")

    def slots(self) -> list[CommunicatorSlot]:
        words = self.words
        end = _FIRST_SLOT + words[SLOTS] * _SLOT_WORDS
        found = []
        for base in range(_FIRST_SLOT, end, _SLOT_WORDS):
            of_slot = words[base + CALLS : base + _SLOT_WORDS]
            found.append(CommunicatorSlot(base, *of_slot))
        return found

    def last(self, count: int = RING) -> list[CallEntry]:
        """Return the rank's last collectives on all communicators, at most `count`, the latest first; [] without any.

        If the rank is entering a collective, the entry may be half written.
        """
        written = self.words[ENTRIES]
        before = max(0, written - count)
        return [self._entry(number) for number in range(written, before, -1)]

    def lines_on(self, slot: int, number: int) -> tuple[int, list[str]]:
        """Return the rank, and the lines of its last calls on one communicator, the latest first, without barriers.

        Only the rank's last 32 calls on all communicators count.

        Args:
            slot: the index of the communicator's slot in `words`.
            number: the number of the latest call that counts.
        """
        lines = []
        for entry in self.last(RING // 2):
            counts = entry.slot == slot and entry.number <= number
            if counts and not entry.call.startswith("barrier"):
                lines.append(entry.site)
        return self.rank, lines

    def entry_of(self, slot: CommunicatorSlot) -> CallEntry | None:
        """Return the rank's last call on the slot's communicator.

        Returns: None if there was no call, or if 64 later calls on other communicators have replaced it.
        """
        later_calls = self.words[ENTRIES] - slot.entry
        if not slot.entry or later_calls >= RING:
            return None
        entry = self._entry(slot.entry)
        return entry if entry.slot == slot.base else None

    def _entry(self, number: int) -> CallEntry:
        offset = _FIRST_ENTRY + number % RING * _ENTRY_BYTES
        *numbers, call_bytes, site_bytes, text = _ENTRY.unpack_from(self.map, offset)
        call = text[:call_bytes].decode(errors="replace")
        site = text[call_bytes : call_bytes + site_bytes].decode(errors="replace")
        calls, entered, waited, slot = numbers
        return CallEntry(calls, entered, waited, slot, call, site)


@dataclass(frozen=True)
class CommunicatorSlot:
    """A copy of a slot of a record: a rank's last call on one communicator.

    Attributes:
        base: the index of the slot's first word in `RankRecord.words`.
        calls: the number of the rank's last call on the communicator, from 1; 0: no call.
        since: when the rank entered this call, by CLOCK_MONOTONIC in ns; 0: the rank has returned from it.
        size: number of the communicator's ranks.
        group: the hash of the communicator's name.
        first: the number in the job of the communicator's rank 0.
        entry: the number of the call's entry in the ring; 0: no call.
        timeout_ns: the time in ns after which the rank itself raises an error; 0: never.
    """

    base: int
    calls: int
    since: int
    size: int
    group: int
    first: int
    entry: int
    timeout_ns: int

    @property
    def timeout(self) -> float:
        """The time in seconds after which the rank itself raises an error; 0: never."""
        return self.timeout_ns / 1e9


@dataclass(frozen=True)
class CallEntry:
    """One collective of a rank, from the ring of its record.

    Attributes:
        number: the call's number on its communicator, from 1.
        entered: when the rank entered the call, by CLOCK_MONOTONIC in ns.
        waited: for how many ns the rank waited until all ranks had entered the call; -1: a rank is still missing, or
            this was not measured.
        slot: the index in `RankRecord.words` of the communicator's slot.
        call: a description of the call.
        site: the line of the program that made the call: "train.py:33 in main".
    """

    number: int
    entered: int
    waited: int
    slot: int
    call: str
    site: str


def text_of(call: str, site: str) -> tuple[bytes, int]:
    """Return the bytes of `call` followed by the bytes of `site`, and the number of bytes of `call`.

    `RankRecord.enter` takes both. A call that is too long loses its end; a site of more than 110 bytes loses its
    beginning.
    """
    place = site.encode(errors="replace")
    if len(place) > MAX_SITE:
        place = b"..." + place[3 - MAX_SITE :]
    words = call.encode(errors="replace")[: _TEXT_BYTES - len(place)]
    return words + place, len(words)
