"""How many calls of the package, in how many files, a program's call leads to: whoever reads its way goes through them.

Every Python call of the package counts, also of lambdas, comprehensions and generators. Calls of threads that run
already do not. Nor does what a rank does because it waits for others: `liveness/waiting.py`,
`SharedMemoryAgreement.wait_for`, and what these call.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import mpistrat
from mpistrat.communicators.contract.agreement import SharedMemoryAgreement

PACKAGE = f"{Path(mpistrat.__file__).parent}/"
WAITING = f"{PACKAGE}liveness/waiting.py"
LOOKS_AGAIN = SharedMemoryAgreement.wait_for.__code__  # a rank that does not find the others there
# Their calls count, but a reader knows what they do.
NO_FILES = ("arrays.py", "reduce_op.py", "nest.py")
WARM_UPS = 24
TRIPS = 25


class Figures(NamedTuple):
    """Attributes: returns: how often the way comes back to a file that it had left."""

    calls: int
    files: int
    returns: int = 1 << 30


class Trip:
    """Around a call. Attributes: calls: file and function of each, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def __enter__(self) -> Trip:
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _see(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        above: FrameType | None = frame
        while above is not None:
            if above.f_code.co_filename == WAITING or above.f_code is LOOKS_AGAIN:
                return
            above = above.f_back
        self.calls.append((code.co_filename.removeprefix(PACKAGE), code.co_name))

    @property
    def figures(self) -> Figures:
        files = [file for file, _ in self.calls if file not in NO_FILES]
        visits = len(list(itertools.groupby(files)))
        different = len(set(files))
        return Figures(len(self.calls), different, visits - different)

    def check(self, most: Figures) -> None:
        over = [figure > limit for figure, limit in zip(self.figures, most, strict=True)]
        steps = [f"{file}:{function}" for file, function in self.calls]
        way = " > ".join(steps)
        assert not any(over), f"{self.figures}, at most {most}: {way}"


def least(call: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> Trip:
    """The shortest of some trips of `call` in steady state. Every rank calls it. Args: before: called before each."""
    for _ in range(WARM_UPS):
        before()
        call()
    trips = [Trip() for _ in range(TRIPS)]
    for trip in trips:
        before()
        with trip:
            call()
    return min(trips, key=lambda trip: trip.figures)
