"""What is told to people on stderr: a line in one piece, so that those of several ranks do not mix."""

from __future__ import annotations

import contextlib
import sys


def tell(text: str) -> None:
    """`text` as a line of this project's; nothing happens where stderr is closed, or None."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"mpistrat: {text}\n")
        sys.stderr.flush()
