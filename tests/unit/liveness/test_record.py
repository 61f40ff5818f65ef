"""Records outlive their process, and keep what tells most."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpistrat.liveness.records.record import (
    MAX_SITE,
    MAX_SLOTS,
    RING,
    RankRecord,
    text_of,
)
from support.job_records import new_record


def test_a_record_is_read_after_its_process_was_killed(tmp_path: Path) -> None:
    path = str(tmp_path / "rank-0")
    program = f"""
import os
from mpistrat.liveness.records.record import SINCE, RankRecord, text_of
record = RankRecord({path!r}, create=True)
record.start(0, 2, "node7", 60.0, 1)
slot = record.new_slot(5, 2)
for call in range(1, 101):
    record.enter(slot, call, *text_of(f"all_reduce({{call}})", "train.py:33 in step"))
    record.waited(slot)
    if call == 100:
        os.kill(os.getpid(), 9)
    record.words[slot + SINCE] = 0
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
    record = RankRecord(path)
    assert record.host == "node7"
    entries = record.last()
    assert [entry.call for entry in entries] == [
        f"all_reduce({call})" for call in range(100, 100 - RING, -1)
    ]
    assert entries[0].site == "train.py:33 in step"
    assert entries[0].waited >= 0
    (slot,) = record.slots()
    assert (slot.calls, slot.size, slot.since > 0) == (100, 2, True)


def test_without_room_there_is_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "rank-0"
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        RankRecord(str(path), create=True)
    assert not path.exists()


def test_long_texts_keep_what_tells_most() -> None:
    text, call_bytes = text_of("c" * 1000, "a" * 1000 + "/train.py:33 in step")
    assert text[:call_bytes].decode() == "c" * call_bytes
    site = text[call_bytes:].decode()
    assert len(site) == MAX_SITE
    assert site.startswith("...")
    assert site.endswith("/train.py:33 in step")


def test_how_a_rank_ended() -> None:
    record = RankRecord(None)
    assert record.end == ""
    for how in ("called sys.exit(0) at train.py:7", "came to its end"):
        record.end = how
        assert record.end == how
    record.end = "é" * 1000
    assert record.end.startswith("é" * 255)
    assert len(record.end) < 257


def test_boards_are_limited() -> None:
    record = new_record(None)
    assert all(record.new_slot(i, 2) is not None for i in range(MAX_SLOTS))
    assert record.new_slot(0, 2) is None


def test_seconds_waited_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    record = new_record(None)
    slot = record.new_slot(0, 2)
    assert slot is not None
    now = 1_000_000_000_000
    monkeypatch.setattr(time, "monotonic_ns", lambda: now)
    record.enter(slot, 1, *text_of("barrier()", "x.py:1 in f"))
    now += 2_500_000_000
    record.waited(slot)
    assert record.seconds_waited() == 2.5
    now += 59_000_000_000
    assert record.seconds_waited() == 2.5
    assert record.seconds_waited(last=10) == 0
    now += 2_000_000_000
    assert record.seconds_waited() == 0
