"""Waits that end after some seconds: for actions that may hang in a file system, and for other ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from mpistrat.liveness import deadlines


def within(seconds: float, action: Callable[[], object]) -> None:
    """Run `action` in a thread, and return when it has ended, or after `seconds`: the action then goes on.

    Where Python can start no thread (at exit), the action runs in the caller, without a limit.
    """
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
    """Wait until `condition()` is true, for at most `seconds`.

    Args: sleeps_at_most: the longest pause between two calls of `condition`, in seconds. The first is 0.001 s long.
    Returns: True if the condition has come true; False after `seconds`.
    """
    until, pause = time.monotonic() + seconds, deadlines.SOON_SLEEPS
    while not condition():
        if time.monotonic() >= until:
            return False
        time.sleep(pause)
        pause = min(pause * 1.5, sleeps_at_most)
    return True
