"""Where the user's program stands."""

from __future__ import annotations

import os
from types import FrameType

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def call_site(frame: FrameType) -> str:
    """The innermost frame outside this package, counted from `frame`: "train.py:33 in main"."""
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
