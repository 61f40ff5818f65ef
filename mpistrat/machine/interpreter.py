"""The Python interpreter for helper processes."""

from __future__ import annotations

import os
import re
import sys


def python_of_helpers() -> str | None:
    """The interpreter's file; None in a frozen program, whose executable would run the program once more."""
    executable = sys.executable or ""
    is_python = re.match(r"(python|pypy)", os.path.basename(executable)) is not None
    if getattr(sys, "frozen", False) or not is_python or not os.access(executable, os.X_OK):
        return None
    return executable
