"""Collectives on the timeline, and as ranges of torch's profiler."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

from mpistrat.communicators.call_signature import describe
from mpistrat.communicators.checked import CheckedCommunicator, _Inside
from mpistrat.communicators.communicator import Communicator
from mpistrat.communicators.station import Station
from mpistrat.flight_recorder.record import SINCE
from mpistrat.trace import profiler
from mpistrat.trace.timeline import Timeline

# Distinct calls, by call site, that are told once each; what is forgotten is told again.
_DISTINCT_CALLS = 4096


class TracedCommunicator(CheckedCommunicator):
    """A checked communicator each of whose calls is an event on `timeline`."""

    timeline: Timeline

    def __init__(
        self,
        inner: Communicator,
        name: str,
        station: Station | None,
        check: str,
        timeline: Timeline,
    ) -> None:
        super().__init__(inner, name, station, check)
        self.timeline = timeline
        self.together = 0  # when all ranks had entered the last call
        self._inside = self._traced_inside = _TracedInside(self)
        self.kind = functools.lru_cache(_DISTINCT_CALLS)(self._new_kind)

    def _enter(self, signature: tuple[Any, ...], cause: Exception | None = None) -> _Inside:
        shown = profiler.begin(signature[0])
        try:
            inside = super()._enter(signature, cause)
        except BaseException:
            profiler.end(shown)
            raise
        if self.agreement is not None:
            self.together = self.timeline.now()
        self._traced_inside.shown = shown
        return inside

    def _part(self, inner: Communicator, name: str, station: Station | None) -> CheckedCommunicator:
        return TracedCommunicator(inner, name, station, self.check, self.timeline)

    def _new_kind(self, signature: tuple[Any, ...], file: str, function: str, line: int) -> int:
        told: dict[str, Any] = {"call": describe(signature), "at": f"{file}:{line} in {function}"}
        nbytes = _bytes_of(signature)
        if nbytes is not None:
            told["bytes"] = nbytes
        # Equal on all ranks of the communicator: by it and the number, `merging` finds what belongs together.
        told |= {"communicator": self.name, "ranks": self.size}
        return self.timeline.kind(signature[0], "collective", **told)


class _TracedInside(_Inside):
    __slots__ = ("shown",)

    _communicator: TracedCommunicator

    def __init__(self, communicator: TracedCommunicator) -> None:
        super().__init__(communicator)
        self.shown: Any = None

    def leave(self, *_: object) -> None:
        communicator = self._communicator
        signature, called_at = communicator.waiting_in, communicator._called_at
        number = communicator.calls
        entered = self._record.words[self._board + SINCE]
        super().leave()
        shown, self.shown = self.shown, None
        profiler.end(shown)
        if signature is None or called_at is None:
            return
        code, line = called_at
        kind = communicator.kind(signature, code.co_filename, code.co_name, line)
        together = communicator.together if communicator.together > entered else 0
        timeline = communicator.timeline
        timeline.add_collective(kind, entered, together, timeline.now(), number)

    __exit__ = leave


def _bytes_of(signature: tuple[Any, ...]) -> int | None:
    """Of this rank's buffer; None where the signature does not tell."""
    for dtype, shape in itertools.pairwise(signature):
        if isinstance(dtype, str) and isinstance(shape, tuple):
            bits = re.search(r"\d+", dtype)
            elements = 1
            for length in shape:
                elements *= length
            return elements * (int(bits[0]) // 8 if bits else 1)  # bool has no number
    return None
