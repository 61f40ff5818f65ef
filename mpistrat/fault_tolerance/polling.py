"""Calls a function again and again, on a thread of its own."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from mpistrat.machine.notices import tell


def keep_asking(
    owner: object,
    name: str,
    ask: Callable[[], bool],
    pause: Callable[[], float],
    explain: Callable[[str], str] | None,
) -> None:
    """Start a daemon thread that calls `ask` until it returns True, or until `owner` is garbage-collected.

    Args:
        owner: any object that can be weakly referenced.
        name: name of the thread.
        ask: function to call; it must not refer to `owner`. After an exception it is called again.
        pause: returns the seconds until the next call.
        explain: makes a line for stderr from the text of the first exception. Later exceptions print nothing; with
            None the first one does not, either.
    """
    stop = threading.Event()
    weakref.finalize(owner, stop.set)

    def run() -> None:
        explain_once = explain
        while True:
            try:
                if ask():
                    return
            except Exception as error:  # any error: the next call may succeed
                if explain_once is not None:
                    tell(explain_once(f"{type(error).__name__}: {error}"))
                    explain_once = None
            if stop.wait(pause()):
                return

    threading.Thread(target=run, name=name, daemon=True).start()
