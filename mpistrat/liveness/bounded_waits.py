"""Waiting, but not for long: for work that may touch a file system that hangs, and for what other ranks do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from mpistrat.liveness import deadlines


def within(seconds: float, action: Callable[[], object]) -> None:
    """Do it in a thread, and wait for it so long at most."""
    thread = threading.Thread(target=action, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # some versions of Python start no threads once exit handlers run
        action()
    else:
        thread.join(seconds)


def soon(
    condition: Callable[[], bool],
    seconds: float,
    *,
    sleeps_at_most: float = deadlines.SOON_SLEEPS_AT_MOST,
) -> bool:
    """Wait until `condition()`, for so long at most; whether it has come true.

    Args: sleeps_at_most: between two looks, in seconds; the pauses grow up to it.
    """
    until, pause = time.monotonic() + seconds, deadlines.SOON_SLEEPS
    while not condition():
        if time.monotonic() >= until:
            return False
        time.sleep(pause)
        pause = min(pause * 1.5, sleeps_at_most)
    return True
