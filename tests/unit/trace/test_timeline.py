"""A process's part of the trace: what is in the file when, and what ends it."""

import errno
import json
import os
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from mpistrat.trace import timeline as timeline_module
from mpistrat.trace.timeline import EVENTS_TOGETHER, Timeline, header_of, host_clock, part_of


def lines_of(folder: Path, rank: int = 0) -> list[Any]:
    with open(part_of(str(folder), rank), encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def made(folder: Path, rank: int = 0) -> Timeline:
    return Timeline(str(folder), rank, 4, "node7", "a clock")


def test_the_header_is_there_from_the_beginning(tmp_path: Path) -> None:
    timeline = made(tmp_path / "a" / "b", rank=3)
    (header,) = lines_of(tmp_path / "a" / "b", 3)
    assert (header["rank"], header["ranks"], header["node"]) == (3, 4, "node7")
    assert header["pid"] == os.getpid()
    assert header_of(timeline.path) == timeline.header


def test_an_earlier_part_is_overwritten(tmp_path: Path) -> None:
    made(tmp_path).close()
    made(tmp_path)
    assert len(lines_of(tmp_path)) == 1


def test_events_are_written_by_number(tmp_path: Path) -> None:
    """Memory is bounded, and a process that is killed loses no more than this."""
    timeline = made(tmp_path)
    kind = timeline.kind("work", "range", function="f")
    now = timeline.now()
    for i in range(EVENTS_TOGETHER - 3):
        timeline.add(kind, now + i, now + i + 1)
    assert len(lines_of(tmp_path)) == 1
    timeline.add(kind, now, now + 1)
    assert len(lines_of(tmp_path)) == 1 + EVENTS_TOGETHER


def test_events_are_written_by_time(tmp_path: Path) -> None:
    timeline = made(tmp_path)
    kind = timeline.kind("work", "range")
    now = timeline.now()
    timeline.add(kind, now, now + 1)
    assert len(lines_of(tmp_path)) == 1
    timeline.add(kind, now, now + 1_000_000_000)
    events = [line for line in lines_of(tmp_path) if isinstance(line, list)]
    assert events == [[kind, 1, now, now + 1], [kind, 1, now, now + 1_000_000_000]]


def test_threads_have_tracks(tmp_path: Path) -> None:
    timeline = made(tmp_path)
    kind = timeline.kind("work", "range")
    timeline.add(kind, 1, 2)
    thread = threading.Thread(target=lambda: timeline.add(kind, 3, 4), name="reader")
    thread.start()
    thread.join()
    timeline.close()
    lines = lines_of(tmp_path)
    assert [line for line in lines if isinstance(line, list)] == [[kind, 1, 1, 2], [kind, 2, 3, 4]]
    tracks = {line["track"]: line["name"] for line in lines if "track" in line}
    assert tracks == {1: "MainThread", 2: "reader"}
    assert list(lines[-1]) == ["end"]


def test_a_full_disk_ends_the_trace_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeline = made(tmp_path)
    kind = timeline.kind("work", "range")

    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(timeline_module.os, "write", full)
    with pytest.warns(RuntimeWarning, match="rank 0 cannot write to .*No space left .*goes on"):
        timeline.flush()
    monkeypatch.undo()
    tracemalloc.start()
    for i in range(2 * EVENTS_TOGETHER):
        timeline.add(kind, i, i + 1)
    own = tracemalloc.Filter(True, timeline_module.__file__)  # other threads allocate, too
    kept = tracemalloc.take_snapshot().filter_traces([own]).statistics("filename")
    tracemalloc.stop()
    assert sum(file.size for file in kept) < EVENTS_TOGETHER  # bytes: no event is kept
    timeline.close()
    assert len(lines_of(tmp_path)) == 1


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        made(tmp_path / "file" / "folder")


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    timeline = made(tmp_path)
    kind = timeline.kind("work", "range")
    timeline.add(kind, 1, 2)
    child = os.fork()
    if child == 0:
        timeline.add(kind, 3, 4)
        timeline.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    timeline.close()
    events = [line for line in lines_of(tmp_path) if isinstance(line, list)]
    assert events == [[kind, 1, 1, 2]]


def test_processes_of_a_host_have_the_same_clock() -> None:
    assert host_clock() == host_clock() != ""
