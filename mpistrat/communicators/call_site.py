"""Where the user's program stands."""

from __future__ import annotations

import os
from types import FrameType

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


_inside: dict[str, bool] = {}  # by file name


def outside(frame: FrameType) -> FrameType:
    """The innermost frame outside this package, counted from `frame`; the outermost if there is none."""
    while True:
        file = frame.f_code.co_filename
        inside = _inside.get(file)
        if inside is None:
            inside = _inside[file] = file.startswith(_PACKAGE)
        if not inside or frame.f_back is None:
            return frame
        frame = frame.f_back


def call_site(frame: FrameType) -> str:
    """Where `outside(frame)` stands: "train.py:33 in main"."""
    frame = outside(frame)
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
