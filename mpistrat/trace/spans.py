"""Hooks through which the program's work is recorded: `with spans.current.range("mirror"): …`.

They lead to the timeline and torch's profiler. This module has the object that records nothing. A program without a
trace uses it, and loads nothing of `mpistrat.trace`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

_NOTHING = contextlib.nullcontext()


class NoSpans:
    """Records nothing. `ranges.Ranges` replaces it when a program is traced."""

    def range(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Return a context in which work is recorded under `name`."""
        return _NOTHING

    def run(self, fn: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
        """Return a context around a `Strategy.run` of `fn`."""
        return _NOTHING

    def begin_steps(self) -> None:
        """Note that this thread has entered `Strategy.replica()`. A step begins, and ends with an optimizer's step."""

    def end_steps(self) -> None:
        """Note that this thread has left `Strategy.replica()`."""

    def watch_optimizers(self, watch_steps: Callable[..., None]) -> None:
        """Record the steps of torch's optimizers from now on. torch must be loaded.

        Args: watch_steps: takes two functions, for torch's optimizers to call before and after each step, as torch's
            hooks.
        """


NO_SPANS = NoSpans()
current = NO_SPANS  # this process's spans; see `mpistrat.trace.ranges.begin`
