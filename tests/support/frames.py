"""Which calls lead from a program to the place where its bytes move."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

Call = tuple[str, str]  # file and function


class Frames:
    """The calls on the stack when the first byte moved, from the outermost on."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def take(self) -> None:
        """Whoever has called the caller moves bytes now."""
        frame: FrameType | None = sys._getframe(2)
        if self.calls:
            return
        while frame is not None:
            self.calls.insert(0, (frame.f_code.co_filename, frame.f_code.co_name))
            frame = frame.f_back

    def since(self, function: str, file: str) -> list[Call]:
        """From the last call of `function`, which stands in `file`, on; both ends count."""
        found = [i for i, call in enumerate(self.calls) if is_in(call, function, file)]
        assert found, f"{function} of {file} is not among {self.calls}"
        return self.calls[found[-1] :]


def is_in(call: Call, function: str, file: str) -> bool:
    return call[1] == function and call[0].endswith(f"/mpistrat/{file}")


def files_of(calls: list[Call]) -> list[str]:
    return list(dict.fromkeys(file for file, _ in calls))


class Watched:
    """Stands in for memory: takes the frames of who writes to it first."""

    def __init__(self, memory: Any, frames: Frames) -> None:
        self._memory, self._frames = memory, frames

    def __setitem__(self, index: Any, value: Any) -> None:
        self._frames.take()
        self._memory[index] = value


def watching(function: Any, frames: Frames, *, itself: bool) -> Any:
    """`function`, which takes the frames when it is called: its caller's, or with `itself` its own, too."""

    def watched(*args: Any, **kwargs: Any) -> Any:
        if not frames.calls:
            frames.take()
            if itself:
                code = function.__code__
                frames.calls.append((code.co_filename, code.co_name))
        return function(*args, **kwargs)

    return watched
