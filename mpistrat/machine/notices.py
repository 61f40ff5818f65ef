"""Lines for people on stderr, each written in one piece, so that the lines of several ranks do not mix."""

from __future__ import annotations

import contextlib
import sys


def tell(text: str) -> None:
    """Write `text` as a line of this project. Does nothing where stderr is closed or None."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"mpistrat: {text}\n")
        sys.stderr.flush()
