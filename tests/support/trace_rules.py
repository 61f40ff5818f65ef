"""What the Trace Event Format asks of a file, and Perfetto of the nesting of its slices."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

NANOSECOND = 1e-3  # in the format's microseconds


def valid_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a trace; AssertionError where it breaks a rule."""
    trace = json.loads(path.read_text(encoding="utf-8"))
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events: list[dict[str, Any]] = trace["traceEvents"]
    tracks = defaultdict(list)
    named = set()
    for event in events:
        assert event["ph"] in ("X", "M"), event
        assert isinstance(event["name"], str), event
        assert isinstance(event["pid"], int), event
        assert isinstance(event["tid"], int), event
        assert isinstance(event.get("args", {}), dict), event
        track = (event["pid"], event["tid"])
        if event["name"] == "thread_name":
            named.add(track)
        if event["ph"] == "X":
            assert event["ts"] >= 0, event
            assert event["dur"] >= 0, event
            tracks[track].append(event)
    assert set(tracks) <= named
    for slices in tracks.values():
        _check_nesting(slices)
    return events


def _check_nesting(slices: list[dict[str, Any]]) -> None:
    """A slice lies within another or beside it. Of two that begin together, the first in the file is the outer one."""
    open_until: list[float] = []
    for event in sorted(slices, key=lambda e: e["ts"]):
        begin = event["ts"]
        end = begin + event["dur"]
        while open_until and open_until[-1] <= begin + NANOSECOND / 2:
            open_until.pop()
        assert not open_until or end <= open_until[-1] + NANOSECOND / 2, event
        open_until.append(end)


def slices_of(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    of_name = [event for event in events if event["name"] == name]
    return [event for event in of_name if event["ph"] == "X"]
