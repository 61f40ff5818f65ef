"""Records how long parts of the program take, if it is traced: `with spans.current.range("mirror"): …`.

`current` is an object that records nothing, until a strategy replaces it by a `ranges.Ranges`, because MPISTRAT_TRACE
is set. A program without a trace loads no other module of `mpistrat.trace`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

_NOTHING = contextlib.nullcontext()


class NoSpans:
    """Records nothing: its methods return at once. `ranges.Ranges` replaces it when a program is traced."""

    def range(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Return a context, and record its duration under `name`."""
        return _NOTHING

    def run(self, fn: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
        """Return a context, and record its duration as a `Strategy.run` of `fn`. Entered by: `Strategy.run`."""
        return _NOTHING

    def begin_steps(self) -> None:
        """Note that a training step begins in this thread, in `Strategy.replica()` or with torch's default group.

        It ends, and the next one begins, when an optimizer has stepped in this thread. `Strategy.run` ends the steps.
        """

    def end_steps(self) -> None:
        """Note that this thread has left `Strategy.replica()`."""

    def watch_optimizers(self, watch_steps: Callable[..., None]) -> None:
        """Record the steps of torch's optimizers from now on. Calls after the first do nothing. torch must be loaded.

        Args: watch_steps: takes two functions, and makes torch's optimizers call them before and after each step.
        """


NO_SPANS = NoSpans()
current = NO_SPANS  # this process's spans; see `mpistrat.trace.ranges.begin`
