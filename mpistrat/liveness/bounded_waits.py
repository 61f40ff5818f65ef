"""Waits that end after some seconds: for actions that may hang in a file system, and for other ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from mpistrat.liveness import deadlines


def within(seconds: float, action: Callable[[], object]) -> None:
    """Run `action` in a daemon thread, and wait until it has ended, for at most `seconds`.

    The caller does not learn whether it has ended. If it has not, it goes on in its thread. Python prints an error of
    the action; it is not raised here. Where Python can start no thread (at exit), the action runs in the caller's
    thread, without a limit.
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

    Args: sleeps_at_most: the longest pause between two calls of `condition`, in seconds. The first pause has 0.001 s.
    Returns: True if the condition has come true; False if it has not within `seconds`.
    """
    until = time.monotonic() + seconds
    pause = deadlines.SOON_SLEEPS
    while not condition():
        if time.monotonic() >= until:
            return False
        time.sleep(pause)
        pause = min(pause * 1.5, sleeps_at_most)
    return True
