"""Where the program's work shows on the timeline and in torch's profiler: `with spans.current.range("mirror"): …`.

This module has the object that does nothing. A program that is not traced uses it, and loads nothing of
`mpistrat.trace`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

_NOTHING = contextlib.nullcontext()


class NoSpans:
    """Nothing is traced."""

    def range(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Around what is called `name`."""
        return _NOTHING

    def run(self, fn: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
        """Around a `Strategy.run` of `fn`."""
        return _NOTHING

    def begin_steps(self) -> None:
        """A `Strategy.replica()` is entered: the first step begins. Each ends with a step of an optimizer."""

    def end_steps(self) -> None:
        """It is left."""

    def watch_optimizers(self, watch_steps: Callable[..., None]) -> None:
        """Show the steps of torch's optimizers from now on. Torch is loaded.

        Args: watch_steps: has every optimizer call two functions around each step, as torch's hooks are called.
        """


NO_SPANS = NoSpans()
current = NO_SPANS  # of this process; see `mpistrat.trace.ranges.begin`
