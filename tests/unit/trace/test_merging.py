"""One trace of parts that are made up, valid by the rules of the Trace Event Format."""

import os
import time
from pathlib import Path

import pytest

from mpistrat.trace.merging import merge, remove_older
from mpistrat.trace.timeline import Timeline, part_of
from support.trace_rules import slices_of, valid_trace

SECOND = 1_000_000_000


def timeline(folder: Path, rank: int, ahead: int = 0, ranks: int = 2, clock: str = "a") -> Timeline:
    """A rank's whose clock is ahead of ours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic_ns", lambda: 100 * SECOND + ahead)
        return Timeline(str(folder), rank, ranks, f"node{rank}", clock)


def collective(
    part: Timeline, number: int, entered: int, together: int, left: int, ranks: int = 2
) -> None:
    kind = part.kind(
        "all_reduce", "collective", call="all_reduce(sum)", communicator="c", ranks=ranks
    )
    part.add_collective(kind, entered, together, left, number)


def test_each_rank_is_a_process_and_each_thread_a_track(tmp_path: Path) -> None:
    for rank in range(2):
        part = timeline(tmp_path, rank)
        part.add(
            part.kind("strategy.run", "range", function='f"\\'), 101 * SECOND, 102 * SECOND + 7
        )
        part.close()
    merged = merge(str(tmp_path))
    assert (merged.ranks, merged.is_complete) == ((0, 1), True)
    events = valid_trace(tmp_path / "trace.json")
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == [f"rank {rank} on node{rank}, pid {os.getpid()}" for rank in range(2)]
    run = slices_of(events, "strategy.run")
    assert [(e["pid"], e["tid"]) for e in run] == [(0, 1), (1, 1)]
    assert (run[0]["ts"], run[0]["dur"]) == (1e6, 1e6 + 0.007)
    assert run[0]["args"] == {"function": 'f"\\'}


def test_who_entered_last_is_named(tmp_path: Path) -> None:
    first, second = timeline(tmp_path, 0), timeline(tmp_path, 1)
    collective(first, 1, 101 * SECOND, 103 * SECOND, 104 * SECOND)
    collective(second, 1, 102 * SECOND, 103 * SECOND, 104 * SECOND)
    collective(first, 2, 106 * SECOND, 107 * SECOND, 108 * SECOND)
    collective(second, 2, 105 * SECOND, 107 * SECOND, 108 * SECOND)
    collective(second, 3, 109 * SECOND, 0, 110 * SECOND)  # the other was killed before
    first.close()
    second.close()
    merge(str(tmp_path))
    events = valid_trace(tmp_path / "trace.json")
    late = [
        (e["pid"], e["args"]["number"], e["args"].get("last to enter"))
        for e in events
        if "number" in e.get("args", {})
    ]
    assert late == [
        (0, 1, "rank 1"),
        (0, 2, "rank 0"),
        (1, 1, "rank 1"),
        (1, 2, "rank 0"),
        (1, 3, None),
    ]
    waits = slices_of(events, "wait for the others")
    assert [(e["pid"], e["dur"]) for e in waits] == [(0, 2e6), (0, 1e6), (1, 1e6), (1, 2e6)]


def test_clocks_are_aligned(tmp_path: Path) -> None:
    """Rank 1's clock was 5 s ahead of rank 0's and lost 1 s meanwhile; rank 2's was only compared with rank 1's."""
    parts = [timeline(tmp_path, r, ranks=3, clock=f"clock {r}") for r in range(3)]
    parts[1].add_comparison("clock 0", 105 * SECOND, -5 * SECOND, 1000)
    parts[1].add_comparison("clock 0", 204 * SECOND, -4 * SECOND, 1000)
    parts[2].add_comparison("clock 1", 50 * SECOND, 104 * SECOND, 1000)
    middle = (150 * SECOND, 154 * SECOND + SECOND // 2, 50 * SECOND + SECOND // 2)
    for part, begin in zip(parts, middle, strict=True):
        part.add(part.kind("work", "range"), begin, begin + SECOND)
        part.close()
    merged = merge(str(tmp_path))
    assert merged.unaligned == ()
    starts = [e["ts"] for e in slices_of(valid_trace(tmp_path / "trace.json"), "work")]
    assert starts[1] - starts[0] == pytest.approx(0, abs=1e4)
    assert starts[2] - starts[1] == pytest.approx(0, abs=2e4)


def test_what_a_killed_rank_leaves_is_shown(tmp_path: Path) -> None:
    whole = timeline(tmp_path, 0, ranks=3)
    whole.add(whole.kind("work", "range"), 101 * SECOND, 102 * SECOND)
    whole.close()
    killed = timeline(tmp_path, 2, ranks=3, clock="never compared")
    killed.add(killed.kind("work", "range"), 101 * SECOND, 102 * SECOND)
    killed.flush()
    with open(killed.path, "a", encoding="utf-8") as file:
        file.write("[0,1,1030000")  # cut off in the middle of a write
    merged = merge(str(tmp_path))
    assert (merged.missing, merged.unfinished, merged.unaligned) == ((1,), (2,), (2,))
    assert len(slices_of(valid_trace(tmp_path / "trace.json"), "work")) == 2
    text = merged.describe()
    assert "no part is there of rank 1" in text
    assert "the part has no end of rank 2" in text


def test_a_folder_without_parts(tmp_path: Path) -> None:
    (tmp_path / "rank-0.part").write_text("something else\n")
    for folder in (tmp_path / "absent", tmp_path):
        with pytest.raises(FileNotFoundError, match="no part of a trace"):
            merge(str(folder))


def test_parts_of_a_larger_job_before_go(tmp_path: Path) -> None:
    for rank in range(4):
        timeline(tmp_path, rank, ranks=4).close()
    merge(str(tmp_path))
    remove_older(str(tmp_path), 2)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["rank-0.part", "rank-1.part"]
    assert os.path.basename(part_of("", 1)) in left
