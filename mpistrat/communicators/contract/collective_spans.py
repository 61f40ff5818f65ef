"""`CollectiveSpans`: shows collectives on the timeline of a trace, and as ranges in torch's profiler."""

from __future__ import annotations

import functools
import itertools
import math
import re
from types import CodeType
from typing import Any

from mpistrat.communicators.contract.call_signature import CallSignature
from mpistrat.trace import profiler
from mpistrat.trace.timeline import Timeline

# For how many pairs of a call and a line of the program a description is kept; for more it is made again.
_DISTINCT_CALLS = 4096


class CollectiveSpans:
    """Adds each call of a communicator to this rank's timeline, as an event. Made by: `Contract`, for a trace.

    Args:
        timeline: this rank's timeline (the events of its trace file).
        name: the communicator's name. `merging` finds all ranks' events of one call by `name` and the call's number.
        size: number of ranks in the communicator.
    """

    def __init__(self, timeline: Timeline, name: str, size: int) -> None:
        self._timeline = timeline
        self._name = name
        self._size = size
        self._kind = functools.lru_cache(_DISTINCT_CALLS)(self._new_kind)
        self._shown: Any = None
        self._call: tuple[CallSignature, str, str, int] | None = None
        self._entered = self._together = 0

    def begin(self, signature: CallSignature, code: CodeType, line: int) -> None:
        """Note that this rank enters a collective that `line` of `code` has called."""
        self._shown = profiler.begin(signature.words[0])
        self._call = signature, code.co_filename, code.co_name, line
        self._together = 0
        self._entered = self._timeline.now()

    def together(self) -> None:
        """Note the time at which all ranks have entered the collective, so this rank's wait for other ranks ends."""
        self._together = self._timeline.now()

    def end(self, number: int) -> None:
        """Add the event: this rank leaves the communicator's `number`-th collective."""
        shown = self._shown
        self._shown = None
        profiler.end(shown)
        call = self._call
        self._call = None
        if call is not None:
            kind = self._kind(*call)
            left = self._timeline.now()
            self._timeline.add_collective(kind, self._entered, self._together, left, number)

    def _new_kind(self, signature: CallSignature, file: str, function: str, line: int) -> int:
        facts: dict[str, Any] = {"call": str(signature), "at": f"{file}:{line} in {function}"}
        nbytes = _bytes_of(signature.words)
        if nbytes is not None:
            facts["bytes"] = nbytes
        facts |= {"communicator": self._name, "ranks": self._size}
        return self._timeline.kind(signature.words[0], "collective", **facts)


def _bytes_of(words: tuple[Any, ...]) -> int | None:
    """Return the number of bytes of this rank's buffer; None if `words` of the signature have no dtype and shape."""
    for dtype, shape in itertools.pairwise(words):
        if isinstance(dtype, str) and isinstance(shape, tuple):
            itemsize = 1  # of "bool", which has no number
            bits = re.search(r"\d+", dtype)
            if bits:
                itemsize = int(bits[0]) // 8
            return math.prod(shape) * itemsize
    return None
