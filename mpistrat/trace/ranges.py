"""Ranges on the timeline and in torch's profiler, for the program's work besides collectives."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

from mpistrat.trace import profiler, spans
from mpistrat.trace.timeline import Timeline

# So many functions keep the number of their kind of events. A function that has dropped out gets a new one.
_MOST_FUNCTIONS = 1024


def begin(timeline: Timeline) -> None:
    """Record ranges on `timeline`, this process's own, from now on: replace `spans.current`. Later calls do nothing."""
    if not isinstance(spans.current, Ranges):
        spans.current = Ranges(timeline)


class Ranges(spans.NoSpans):
    """Records the durations of a program's work on `timeline`, and in torch's profiler. See `spans.NoSpans`."""

    def __init__(self, timeline: Timeline) -> None:
        @functools.cache
        def kind(name: str) -> int:
            return timeline.kind(name, "range")

        @functools.lru_cache(_MOST_FUNCTIONS)
        def kind_of_run(function: str) -> int:
            return timeline.kind("strategy.run", "range", function=function)

        self._timeline = timeline
        self._kind = kind
        self._kind_of_run = kind_of_run
        self._watches_optimizers = False
        # .began: the start of the current step, inside replica() or with a default group
        self._steps = threading.local()

    def begin_steps(self) -> None:
        self._steps.began = self._timeline.now()

    def end_steps(self) -> None:
        vars(self._steps).clear()

    def range(self, name: str) -> contextlib.AbstractContextManager[None]:
        return _Range(self._timeline, self._kind(name), name)

    def run(self, fn: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
        self.end_steps()  # they would begin before a run and end within it
        function = getattr(fn, "__qualname__", type(fn).__name__)
        return _Range(self._timeline, self._kind_of_run(function), "strategy.run")

    def watch_optimizers(self, watch_steps: Callable[..., None]) -> None:
        """Record the steps of torch's optimizers by torch's hooks, on the timeline: the profiler shows them anyway.

        After `begin_steps`, the end of an optimizer's step also ends a "step". Later calls do nothing.
        """
        if self._watches_optimizers:
            return
        self._watches_optimizers = True
        begun = threading.local()

        def begin(optimizer: Any, args: Any, kwargs: Any) -> None:
            begun.at = self._timeline.now()

        def end(optimizer: Any, args: Any, kwargs: Any) -> None:
            kind = self._kind(f"{type(optimizer).__name__}.step")
            now = self._timeline.now()
            self._timeline.add(kind, begun.at, now)
            step_began = getattr(self._steps, "began", None)
            if step_began is not None:
                self._timeline.add(self._kind("step"), step_began, now)
                self._steps.began = now

        watch_steps(begin, end)


class _Range(contextlib.AbstractContextManager[None]):
    __slots__ = ("_kind", "_name", "_shown", "_started", "_timeline")

    def __init__(self, timeline: Timeline, kind: int, name: str) -> None:
        self._timeline = timeline
        self._kind = kind
        self._name = name

    def __enter__(self) -> None:
        self._shown = profiler.begin(self._name)
        self._started = self._timeline.now()

    def __exit__(self, *_: object) -> None:
        timeline = self._timeline
        timeline.add(self._kind, self._started, timeline.now())
        profiler.end(self._shown)
