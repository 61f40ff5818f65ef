"""The agreement on processors that reorder loads and stores: what was written before it can be read after it.

ARM's do that, and none is at hand. Here each rank is a thread whose loads and stores go through a `Processor` that
reorders them as much as it may.
"""

from __future__ import annotations

import itertools
import random
import threading
from typing import Any

import pytest

from mpistrat.communicators.contract.agreement import SharedMemoryAgreement
from mpistrat.liveness import deadlines
from mpistrat.liveness.records.record import WORD, RankRecord
from mpistrat.liveness.records.watch import CommunicatorWatch
from support.job_records import new_record

RANKS, CALLS = 3, 300
SAME = 7  # the digest of all calls


class Processor:
    """Its stores reach the memory in any order, and its loads may give what it has seen before, until its fence."""

    def __init__(self, memory: dict[Any, int], lock: threading.Lock, seed: int) -> None:
        self._memory, self._lock, self._random = memory, lock, random.Random(seed)
        self._stores: dict[Any, int] = {}
        self._seen: dict[Any, int] = {}

    def store(self, place: Any, value: int) -> None:
        with self._lock:
            self._stores[place] = value
            self._drain_one()

    def load(self, place: Any) -> int:
        with self._lock:
            self._drain_one()
            if self._memory:  # a load that the program comes to later only
                ahead = self._random.choice(list(self._memory))
                self._seen[ahead] = self._memory[ahead]
            if place in self._stores:
                return self._stores[place]
            if place not in self._seen or self._random.random() < 0.5:
                self._seen[place] = self._memory.get(place, 0)
            return self._seen[place]

    def fence(self) -> None:
        with self._lock:
            self._memory.update(self._stores)
            self._stores.clear()
            self._seen.clear()

    def _drain_one(self) -> None:
        if self._stores and self._random.random() < 0.5:
            place = self._random.choice(list(self._stores))
            self._memory[place] = self._stores.pop(place)


class RecordIn(RankRecord):
    """A record whose words are the test's own."""

    def __init__(self, words: Any) -> None:
        self.words, self.path = words, None


class Words:
    """A rank's words, as a processor sees them."""

    def __init__(self, processor: Processor, rank: int) -> None:
        self._processor, self._rank = processor, rank

    def __getitem__(self, index: int) -> int:
        return self._processor.load((self._rank, index))

    def __setitem__(self, index: int, value: int) -> None:
        self._processor.store((self._rank, index), value)


BEFORE, AFTER = 0, 1  # the two fences of an agreement


def wrong_sums(seed: int, missing: int | None = None) -> int:
    """How many of the sums of all ranks are wrong: each writes into its slot, agrees, and reads all slots.

    Args: missing: the fence that is left out.
    """
    memory: dict[Any, int] = {}
    lock, wrong = threading.Lock(), [0] * RANKS

    def of_rank(rank: int) -> None:
        processor = Processor(memory, lock, seed * RANKS + rank)
        words = [Words(processor, r) for r in range(RANKS)]
        record = RecordIn(words[rank])
        peers: Any = [(words[r], 0) for r in range(RANKS) if r != rank]
        fences = itertools.count()

        def fence() -> None:
            if next(fences) % 2 != missing:
                processor.fence()

        agreement = SharedMemoryAgreement(CommunicatorWatch(record, 0, peers, crowded=True), fence)
        for call in range(1, CALLS):
            processor.store((rank, "slot", call & 1), 100 * call + rank)
            assert agreement.agree(call, SAME)
            values = [processor.load((r, "slot", call & 1)) for r in range(RANKS)]
            wrong[rank] += values != [100 * call + r for r in range(RANKS)]
        processor.fence()

    threads = [threading.Thread(target=of_rank, args=(rank,), daemon=True) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    return sum(wrong)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_written_before_is_read_after(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "RANK_SLEEPS_AT_LEAST", 0.0)
    assert wrong_sums(seed) == 0


@pytest.mark.parametrize("missing", [BEFORE, AFTER])
def test_the_processor_would_show_a_missing_fence(
    missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "RANK_SLEEPS_AT_LEAST", 0.0)
    assert wrong_sums(0, missing) > 0


@pytest.mark.parametrize("crowded", [False, True])
def test_where_ranks_outnumber_cores_one_look_and_the_core_is_given_away(
    crowded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, yields = itertools.count(1), itertools.count(1)
    looked = yielded = 0

    class Late:
        """The words of a rank that comes once the core was given away three times."""

        def __getitem__(self, index: int) -> int:
            nonlocal looked
            if yielded == 0:
                looked = next(numbers)
            return SAME << 8 | 1 if yielded >= 3 else 0

    def give_away() -> None:
        nonlocal yielded
        yielded = next(yields)

    monkeypatch.setattr("os.sched_yield", give_away)
    monkeypatch.setattr(deadlines, "RANK_YIELDS", 60.0)  # others may have the core meanwhile
    words: Any = dict.fromkeys(range(100), 0)
    record = RecordIn(words)
    peers: Any = [(Late(), 0)]
    agreement = SharedMemoryAgreement(CommunicatorWatch(record, 0, peers, crowded=crowded), None)
    assert agreement.agree(1, SAME)
    assert yielded == 3
    assert (looked <= 3) == crowded


def of_the_second(word: int) -> SharedMemoryAgreement:
    """Rank 1's agreement with rank 0, which has written `word`."""
    first, second = (new_record(None, rank) for rank in range(2))
    theirs, mine = first.new_slot(7, 2), second.new_slot(7, 2)
    assert theirs is not None
    assert mine is not None
    first.words[theirs + WORD] = word
    return SharedMemoryAgreement(CommunicatorWatch(second, mine, [(first.words, theirs)], False))


@pytest.mark.parametrize("calls", [1, 255, 256])
def test_a_board_compares(calls: int) -> None:
    agreement = of_the_second(12 << 8 | calls & 0xFF)
    assert agreement.agree(calls, 12)
    assert not agreement.agree(calls, 13)


def test_a_rank_that_is_one_call_ahead_has_agreed() -> None:
    assert of_the_second(99 << 8 | (256 & 0xFF)).agree(255, 12)
