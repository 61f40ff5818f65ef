"""Merge the parts of a trace (a file of each rank) into one timeline in Chrome's Trace Event Format, for Perfetto.

Sources: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU; the part
of it that Perfetto shows: https://perfetto.dev/docs/getting-started/other-formats. A process (`pid`) is a rank, a
thread (`tid`) a track. Complete events (`ph` "X") nest by their times in microseconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import IO, Any

from mpistrat.errors import listed
from mpistrat.machine.private_files import create
from mpistrat.trace.clocks import Alignment, Comparison
from mpistrat.trace.timeline import HEADER_VERSION, header_of, part_of

_PART = re.compile(r"rank-(\d+)\.part")
_Json = dict[str, Any]
_Ranks = tuple[int, ...]
_Collective = tuple[str, int]  # the communicator's name, and the number of the call
_LastToEnter = dict[_Collective, tuple[int, int, int]]  # see `_last_to_enter`
_Conversion = Callable[[int], int]  # converts a clock's times into another clock's times, in ns


def trace_of(folder: str) -> str:
    return os.path.join(folder, "trace.json")


@dataclass(frozen=True)
class Merged:
    """The result of `merge`. Ranks are numbers in ascending order.

    Attributes:
        path: the merged file.
        ranks: the ranks that have left a part.
        events: the number of events in the file.
        missing: the ranks that have left no part.
        unfinished: the ranks with a part that has no end: they were killed, still run, or could not write.
        unaligned: the ranks with a clock that was not compared with the clock of the lowest rank in `ranks`; the times
            of their events in the file do not match.
    """

    path: str
    ranks: _Ranks
    events: int
    missing: _Ranks
    unfinished: _Ranks
    unaligned: _Ranks

    @property
    def is_complete(self) -> bool:
        return not (self.missing or self.unfinished or self.unaligned)

    def describe(self) -> str:
        lines = [
            f"{self.events} events of {len(self.ranks)} ranks are in {self.path}; open it at https://ui.perfetto.dev"
        ]
        lacks = {
            "no part is there of {ranks}": self.missing,
            "the part has no end of {ranks}: killed, still running, or it could not be written": self.unfinished,
            "the clock was not compared with rank {first}'s, so the times do not match, of {ranks}": self.unaligned,
        }
        for text, ranks in lacks.items():
            if ranks:
                lack = text.format(ranks=listed(ranks), first=self.ranks[0])
                lines.append(f"  {lack}")
        return "\n".join(lines)


def merge(folder: str) -> Merged:
    """Write `trace.json` in `folder` from the parts that are there. It replaces an older file; the parts stay.

    It keeps the times of all collectives in memory, but not the other events.

    Called by: rank 0 at the program's end, or `mpistrat trace`.
    Raises: FileNotFoundError if there is no readable part; OSError if the file cannot be written.
    """
    parts = _readable_parts(folder)
    aligned = _alignments(parts)
    for part in parts:
        part.aligned = aligned.get(part.clock, _unchanged)
    path = trace_of(folder)
    with create(f"{path}.new") as file:
        events = _write(file, parts)
    os.replace(f"{path}.new", path)
    ranks = tuple(part.rank for part in parts)
    missing = set(range(parts[0].size)).difference(ranks)
    unfinished = tuple(part.rank for part in parts if not part.has_end)
    unaligned = tuple(part.rank for part in parts if part.clock not in aligned)
    return Merged(path, ranks, events, tuple(sorted(missing)), unfinished, unaligned)


def _readable_parts(folder: str) -> list[_RankTrace]:
    """Return the parts in `folder` that have a valid header, in rank order. Raises: FileNotFoundError if none has."""
    parts = []
    for rank, path in _parts_in(folder).items():
        if header := _valid_header(path, rank):
            parts.append(_RankTrace(path, header))
    if not parts:
        raise FileNotFoundError(f"no part of a trace (rank-0.part, …) is in {folder}")
    return parts


def _write(file: IO[str], parts: list[_RankTrace]) -> int:
    """Write the events of all parts as one trace. Times count from the earliest beginning of a part, as 0.

    Returns: the number of events; the names of ranks and threads count as events.
    """
    last = _last_to_enter(parts)
    beginning = min(part.aligned(part.begins) for part in parts)
    file.write('{"displayTimeUnit":"ms","traceEvents":[')
    count = 0
    for part in parts:
        for event in part.trace_events(beginning, last):
            file.write(",\n" if count else "\n")
            file.write(event)
            count += 1
    file.write("\n]}\n")
    return count


def is_outdated(folder: str) -> bool:
    """Return whether `trace.json` is missing, or older than a part. Raises: OSError if the folder cannot be read."""
    changed = [os.path.getmtime(part) for part in _parts_in(folder).values()]
    newest = max(changed, default=0.0)
    trace = trace_of(folder)
    if not os.path.exists(trace):
        return True
    return os.path.getmtime(trace) < newest


def size_of_parts(folder: str) -> int:
    """Return the size of all parts in `folder` together, in bytes; 0 if there are none.

    Raises: OSError if a part cannot be read.
    """
    return sum(os.path.getsize(part) for part in _parts_in(folder).values())


def remove_parts(folder: str) -> None:
    _remove(_parts_in(folder).values())


def remove_older(folder: str, size: int) -> None:
    """Remove an earlier job's `trace.json`, and its parts of ranks that this job of `size` ranks does not have.

    This job overwrites the other parts. Called by: rank 0, before it writes. Files that cannot be removed stay.
    """
    parts = _parts_in(folder)
    older = [parts[rank] for rank in parts if rank >= size]
    _remove([trace_of(folder), *older])


def _remove(paths: Iterable[str]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _parts_in(folder: str) -> dict[int, str]:
    """Return the paths of the parts in `folder` by rank, in rank order."""
    try:
        found = [_PART.fullmatch(name) for name in os.listdir(folder)]
    except FileNotFoundError:
        return {}
    ranks = sorted(int(match[1]) for match in found if match)
    return {rank: part_of(folder, rank) for rank in ranks}


def _unchanged(time: int) -> int:
    return time


def _valid_header(path: str, rank: int) -> _Json | None:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        header: _Json = json.loads(header_of(path))
        if header["trace"] == HEADER_VERSION and header["rank"] == rank:
            return header
    return None


class _EventKind:
    """The properties that many events share.

    Attributes:
        is_collective: whether the events are collectives.
        communicator, ranks: a collective's communicator, and its number of ranks; "" and 0 for other events.
        text: name, category and details as JSON, without the brace that ends "args": a collective adds details.
    """

    def __init__(self, name: str, category: str, details: _Json) -> None:
        self.is_collective = category == "collective"
        self.communicator: str = details.get("communicator", "")
        self.ranks: int = details.get("ranks", 0)
        start = f'"name":{json.dumps(name)},"cat":{json.dumps(category)},"args":'
        self.text = start + json.dumps(details)[:-1]


class _RankTrace:
    """Reads one rank's part of the trace. Events are read anew at each iteration; all other lines at the start.

    Args: header: the first line of the part, read as JSON.
    Attributes:
        aligned: converts the part's times into times of the first part's clock, in ns; set by `merge`.
        has_end: whether the rank has closed the part.
        kinds: by number, the properties that events share.
        tracks: by number, the names of the threads.
        comparisons: pairs (the other clock's name, a comparison of this part's clock with it).
    """

    def __init__(self, path: str, header: _Json) -> None:
        self.path = path
        self.rank = header["rank"]
        self.size = header["ranks"]
        self.clock = header["clock"]
        self.begins = header["begins"]
        self.name = f"rank {self.rank} on {header['node']}, pid {header['pid']}"
        self.aligned: _Conversion = _unchanged
        self.has_end = False
        self.kinds: dict[int, _EventKind] = {}
        self.tracks: dict[int, str] = {}
        self.comparisons: list[tuple[str, Comparison]] = []
        for line in self.lines("{"):
            if "kind" in line:
                kind = _EventKind(line["name"], line["category"], line["told"])
                self.kinds[line["kind"]] = kind
            elif "track" in line:
                self.tracks[line["track"]] = line["name"]
            elif "reference" in line:
                found = Comparison(line["at"], line["ahead"], line["error"])
                self.comparisons.append((line["reference"], found))
            elif "end" in line:
                self.has_end = True

    def trace_events(self, beginning: int, last: _LastToEnter) -> Iterator[str]:
        """Yield each event of the part as JSON text, after events that name the rank and its threads.

        A collective yields two more, "wait for the others" and "move bytes", if it is known when all had entered it.

        Args:
            beginning: times count from this time of the first part's clock, in ns.
            last: the result of `_last_to_enter`.
        """
        pid = self.rank
        yield _metadata("process_name", pid, 0, name=self.name)
        yield _metadata("process_sort_index", pid, 0, sort_index=pid)
        for track, name in self.tracks.items():
            yield _metadata("thread_name", pid, track, name=name)
            yield _metadata("thread_sort_index", pid, track, sort_index=track)

        def complete(track: int, start: int, end: int, rest: str) -> str:
            since = _us(start - beginning)
            duration = _us(end - start)
            times = f'"ts":{since},"dur":{duration}'
            return f'{{"ph":"X","pid":{pid},"tid":{track},{times},{rest}}}'

        for kind, track, *times in self.lines("["):
            about = self.kinds[kind]
            entered = self.aligned(times[0])
            if not about.is_collective:
                left = self.aligned(times[1])
                yield complete(track, entered, left, f"{about.text}}}")
                continue
            left = self.aligned(times[2])
            number = times[3]
            seen, _, rank = last[about.communicator, number]
            details = f'"number":{number}'
            if seen == about.ranks:
                details += f',"last to enter":"rank {rank}"'
            yield complete(track, entered, left, f"{about.text},{details}}}")
            if times[1]:
                together = self.aligned(times[1])
                wait = '"name":"wait for the others","cat":"waiting"'
                move = '"name":"move bytes","cat":"moving"'
                yield complete(track, entered, together, wait)
                yield complete(track, together, left, move)

    def lines(self, first: str) -> Iterator[Any]:
        """Yield the JSON values of the lines that begin with `first`: "{" for facts, "[" for events. Reads the file."""
        with open(self.path, encoding="utf-8", errors="replace") as file:
            for line in file:
                # The last line of a rank that was killed may be cut off.
                if line.startswith(first) and line.endswith("\n"):
                    yield json.loads(line)


def _alignments(parts: list[_RankTrace]) -> dict[str, _Conversion]:
    """Return by clock's name the function that converts its times into times of the first part's clock, in ns.

    A clock has no entry if no chain of comparisons leads to the first part's clock.
    """
    found: defaultdict[tuple[str, str], list[Comparison]] = defaultdict(list)
    for part in parts:
        for reference, comparison in part.comparisons:
            found[part.clock, reference].append(comparison)
    known: dict[str, _Conversion] = {parts[0].clock: _unchanged}
    while True:
        reached = {
            clock: _chained(Alignment(comparisons), known[reference])
            for (clock, reference), comparisons in found.items()
            if clock not in known and reference in known
        }
        if not reached:
            return known
        known |= reached


def _chained(first: _Conversion, second: _Conversion) -> _Conversion:
    return lambda time: second(first(time))


def _last_to_enter(parts: list[_RankTrace]) -> _LastToEnter:
    """Return for each collective (communicator's name, number of the call) three numbers about the parts' calls: how
    many ranks' calls the parts have; when the last rank entered, in ns of the first part's clock; that rank's number.
    """
    last: _LastToEnter = {}
    for part in parts:
        for event in part.lines("["):
            about = part.kinds[event[0]]
            if about.is_collective:
                key = (about.communicator, event[5])
                entered = part.aligned(event[2])
                seen, latest, rank = last.get(key, (0, entered, part.rank))
                if entered > latest:
                    latest = entered
                    rank = part.rank
                last[key] = (seen + 1, latest, rank)
    return last


def _metadata(what: str, pid: int, tid: int, **arguments: Any) -> str:
    return json.dumps({"ph": "M", "pid": pid, "tid": tid, "name": what, "args": arguments})


def _us(nanoseconds: int) -> str:
    """Return nanoseconds as text in microseconds with three decimals: "1234.567". A float would lose digits."""
    return str(Decimal(nanoseconds).scaleb(-3))
