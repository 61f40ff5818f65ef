"""Where the program's work shows on the timeline and in torch's profiler: `with spans.current.range("mirror"): …`.

Here is what does nothing, for programs that are not traced: they load nothing of `mpistrat.trace`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import CodeType
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

    def watch_optimizers(self) -> None:
        """Show the steps of torch's optimizers from now on. Torch is loaded."""


class NoCollectiveSpans:
    """No collective of a communicator is traced."""

    def begin(self, signature: Any, code: CodeType, line: int) -> None:
        """This rank enters a collective, a `CallSignature`, called at `line` of `code`."""

    def together(self) -> None:
        """All ranks have entered it."""

    def end(self, number: int) -> None:
        """This rank leaves it: the `number`-th of its communicator."""


NO_COLLECTIVE_SPANS = NoCollectiveSpans()

current = NoSpans()  # of this process; see `mpistrat.trace.ranges.begin`
