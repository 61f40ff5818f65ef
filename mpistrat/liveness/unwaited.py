"""Work that may touch a file system that hangs: it is done by a thread that nobody waits for, or not for long."""

from __future__ import annotations

import threading
from collections.abc import Callable


def within(seconds: float, action: Callable[[], object]) -> None:
    """Do it, and wait for it so long at most."""
    thread = threading.Thread(target=action, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # some versions of Python start no threads once exit handlers run
        action()
    else:
        thread.join(seconds)
