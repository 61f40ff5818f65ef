"""`mpistrat trace`: draws a timeline of the ranks of a traced job, and says where each rank's time went."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

from mpistrat.errors import counted
from mpistrat.machine.private_files import private
from mpistrat.trace import merging

# The activities and their colours, by Okabe and Ito: people with colour blindness tell them apart.
_COLOURS = {
    "compute": "#b8d8ee",
    "backward": "#0072b2",
    "wait for the others": "#d55e00",
    "move bytes": "#009e73",
    "input": "#f0e442",
}
_COMPUTE, _BACKWARD, _WAIT, _MOVE, _INPUT = _COLOURS
# By the category or the name of an event. A collective counts as moving bytes, unless it has parts.
_ACTIVITIES = {"collective": _MOVE, "moving": _MOVE, "waiting": _WAIT, "next(iterator)": _INPUT}
_ACTIVITIES |= {"strategy.run": _COMPUTE, "step": _COMPUTE, "backward": _BACKWARD}
_LOSSES = {
    _WAIT: "The ranks wait for each other by turns: give each the same work, and cores of its own.",
    _MOVE: "Move fewer bytes: larger batches, accumulated gradients, or a wire format.",
    _INPUT: "Read faster: keep the DataLoader's workers (persistent_workers=True), or try another num_workers=.",
}
_NAMES_OF_STEPS = ("strategy.run", "step")
_MUCH = 0.1  # of a rank's time: worth a change
_STEPS = 8  # in the picture of a long run: so many can still be told apart
_MAIN_THREAD = "MainThread"


class _Span(NamedTuple):
    """A time that a thread of a rank spent on an activity. Times are seconds from the trace's beginning.

    Attributes:
        name: the event's name in the trace.
        last: for a collective or its wait, the rank that entered it last: "rank 2"; "" if that is not known.
    """

    thread: str
    start: float
    end: float
    activity: str
    name: str
    last: str


class _Trace:
    """The work of the ranks of a traced job. The constructor reads the file.

    Args: path: a `trace.json` that `merging.merge` has written: an event in each line.
    Attributes:
        names: for each rank, its name: "rank 2 on node1".
        spans: for each rank, the spans of its threads.
        steps: the times when steps of the lowest rank began.
        since: sums begin at this time, the second step's; 0 for two steps or fewer.
        end: the time when the last span ended.
        activities: the activities that any rank has spent time on.
    Raises: OSError if the file cannot be read; LookupError or ValueError if it is damaged or has no events.
    """

    def __init__(self, path: str) -> None:
        self.names: dict[int, str] = {}
        self.activities: set[str] = set()
        self._threads: dict[tuple[int, int], str] = {}
        self.spans: defaultdict[int, list[_Span]] = defaultdict(list)
        self.end = 0.0
        with open(path, encoding="utf-8") as file:
            for line in file:
                if line.startswith('{"ph"'):
                    event = json.loads(line.rstrip(",\n"))
                    self._add(event)
        of_lowest = self.spans[min(self.spans)]
        starts = [each.start for each in of_lowest if each.name in _NAMES_OF_STEPS]
        self.steps = sorted(starts)
        # The first step is left out of the sums: first calls, connections and imports make it long.
        self.since = self.steps[1] if len(self.steps) > 2 else 0.0

    def _add(self, event: dict[str, Any]) -> None:
        rank = event["pid"]
        thread = event["tid"]
        name = event["name"]
        details = event.get("args", {})
        if name == "process_name":
            self.names[rank] = details["name"].partition(", pid ")[0]
            return
        if name == "thread_name":
            self._threads[rank, thread] = details["name"]
            return
        category = event.get("cat", "")
        activity = _ACTIVITIES.get(category, _ACTIVITIES.get(name))
        if not activity:
            return
        last = details.get("last to enter", "")
        if activity == _WAIT:  # it and "move bytes" follow their collective, and replace it
            last = self.spans[rank].pop().last
        start = event["ts"] / 1e6
        end = start + event["dur"] / 1e6
        thread_name = self._threads[rank, thread]
        span = _Span(thread_name, start, end, activity, name, last)
        self.spans[rank].append(span)
        self.activities.add(activity)
        self.end = max(self.end, end)

    def seconds(self, rank: int, *activities: str) -> float:
        """Return the seconds that the rank spent on the activities. Seconds in several spans count once.

        Threads that make no steps do not count: they communicate while another thread computes. If no thread makes
        steps, all count.
        """
        total = 0.0
        reached = self.since
        spans = self.spans[rank]
        training = {each.thread for each in spans if each.activity == _COMPUTE}
        for each in sorted(spans, key=lambda each: each.start):
            counts = not training or each.thread in training
            if counts and each.activity in activities:
                begin = max(each.start, reached)
                total += max(0.0, each.end - begin)
                reached = max(reached, each.end)
        return total

    def share(self, rank: int, activity: str) -> float:
        """Return the `seconds` as a part of the rank's time."""
        whole = self.seconds(rank, *_COLOURS)
        part = self.seconds(rank, activity)
        return part / max(whole, 1e-9)

    def waited_for(self) -> dict[str, float]:
        """Return the seconds that ranks have waited for another rank, by its name: "rank 2"."""
        found: dict[str, float] = defaultdict(float)
        for spans in self.spans.values():
            for each in spans:
                if each.activity == _WAIT and each.last:
                    begin = max(each.start, self.since)
                    found[each.last] += max(0.0, each.end - begin)
        return found


def run(folder: str) -> int:
    """Make `trace.json` in the folder if it is missing or older than a rank's part, draw it, and print a summary.

    Args: folder: the folder that MPISTRAT_TRACE named.
    Returns: the exit code: 0, or 1 if there is no trace, no matplotlib to draw it, or no place for the picture.
    """
    path = merging.trace_of(folder)
    picture = os.path.join(folder, "timeline.png")
    can_draw = importlib.util.find_spec("matplotlib") is not None
    place = "the picture" if can_draw else path  # to look in for single spans
    error: object = "a picture needs matplotlib: pip install matplotlib"
    try:
        if merging.is_outdated(folder):
            merged = merging.merge(folder)
            print(merged.describe())
        trace = _Trace(path)
        lines = [*_summary(trace), *_advice(trace, place)]
        if can_draw:
            title = _draw(trace, picture)
            lines.insert(0, f"{picture} shows {title}.")
            error = ""
        print(*lines, sep="\n")
    except OSError as failed:
        error = failed
    except (LookupError, ValueError):
        error = f"{path} is damaged, or has no events: remove it, and trace the job again"
    if error:
        print(f"mpistrat trace: {error}", file=sys.stderr)
    return int(bool(error))


def _summary(trace: _Trace) -> Iterator[str]:
    """Yield a line for each rank: its seconds, and how many it waited, moved bytes and read input ("–": not known)."""
    wide = max(len(name) for name in trace.names.values())
    part = "after the first step" if trace.since else "the whole trace"
    wide_part = max(wide, 20)
    yield f"{part:{wide_part}}{'waiting':>19}{'moving bytes':>18}{'input':>18}"
    for rank, name in trace.names.items():
        parts = []
        for activity in _LOSSES:
            seconds = trace.seconds(rank, activity)
            parts.append(f"{seconds:8.2f} s {trace.share(rank, activity):6.1%}")
        if _INPUT not in trace.activities:
            parts[-1] = f"{'–':>17}"
        whole = trace.seconds(rank, *_COLOURS)
        yield f"{name:{wide}} {whole:8.2f} s" + "".join(parts)


def _advice(trace: _Trace, where: str) -> Iterator[str]:
    """Yield the rank that the others waited for longest, and advice about the activity that ranks lose most time by.

    Args: where: the place to look in for single spans.
    """
    shares = []
    for rank in trace.names:
        for activity in _LOSSES:
            share = trace.share(rank, activity)
            shares.append((share, activity))
    most, largest = max(shares)
    waits = trace.waited_for()
    advice = _LOSSES[largest]
    if waits:
        slowest = max(waits, key=waits.__getitem__)
        longest = waits[slowest]
        total = sum(waits.values())
        yield f"The others waited longest for {slowest}: {longest:.2f} of {total:.2f} s of waiting."
        if largest == _WAIT and longest > total / 2:
            advice = f"Look in {where} for the work of {slowest} while the others wait."
    if most >= _MUCH:
        yield advice
    elif _INPUT in trace.activities:
        yield "Each rank computes for more than nine tenths of its time: there is little else to mend."


def _draw(trace: _Trace, path: str) -> str:
    """Draw a row for each rank, and one for each more of its threads. Returns: the title, which names the steps."""
    import matplotlib as mpl

    mpl.use("Agg")  # no screen on a compute node
    from matplotlib import patches, pyplot

    start, end, part = _window(trace)
    labels, rows = zip(*_rows(trace, start, end), strict=True)
    height = 1.6 + 0.32 * len(rows)
    figure, axes = pyplot.subplots(figsize=(11, height), layout="constrained")
    for number, spans in enumerate(rows):  # inner spans come later, and cover the outer ones
        colours = [_COLOURS[each.activity] for each in spans]
        times = [(each.start, each.end - each.start) for each in spans]
        top = number - 0.4
        axes.broken_barh(times, (top, 0.8), facecolors=colours, linewidth=0)
    axes.set_yticks(range(len(rows)), labels)
    ranks = counted(len(trace.names), "rank")
    title = f"{ranks}, {part}"
    axes.set(xlabel="seconds since the trace began", title=title, xlim=(start, end))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    handles = [patches.Patch(color=colour, label=name) for name, colour in _COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    with open(path, "wb", opener=private) as file:
        figure.savefig(file, dpi=150, format="png")
    pyplot.close(figure)
    return title


def _window(trace: _Trace) -> tuple[float, float, str]:
    """Return the part of the trace that is drawn: its start and end in seconds, and its name for the title."""
    count = len(trace.steps)
    edges = [*trace.steps, trace.end]
    if count <= 2:
        return 0.0, edges[-1], "the whole trace"
    first = max(1, (count - _STEPS) // 2)
    last = min(first + _STEPS, count)
    part = f"steps {first + 1} to {last} of {count}"
    return edges[first], edges[last], part


def _rows(trace: _Trace, start: float, end: float) -> Iterator[tuple[str, list[_Span]]]:
    """Yield each thread that has spans between two times, rank by rank: a name and the spans, outer ones first."""
    for rank, spans in trace.spans.items():
        shown = [each for each in spans if each.start < end and each.end > start]
        shown.sort(key=_place)
        for thread, of_thread in groupby(shown, key=lambda each: each.thread):
            names = {_MAIN_THREAD: trace.names[rank]}
            yield names.get(thread, f"{thread}, rank {rank}"), list(of_thread)


def _place(span: _Span) -> tuple[bool, str, float, float]:
    """Return the key that sorts the spans of a rank: the main thread first, outer spans before inner ones."""
    of_other = span.thread != _MAIN_THREAD
    return of_other, span.thread, span.start, -span.end
