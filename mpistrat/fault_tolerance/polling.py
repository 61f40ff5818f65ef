"""Asking again and again, on a thread of its own."""

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
    """Call `ask` on a thread called `name` until it returns True, as long as `owner` exists.

    Args:
        ask: does not refer to `owner`.
        pause: gives the seconds until the next call.
        explain: makes a line for people of the first error; it is asked again after errors. None: nothing is said.
    """
    stop = threading.Event()
    weakref.finalize(owner, stop.set)

    def run() -> None:
        explain_once = explain
        while True:
            try:
                if ask():
                    return
            except Exception as error:  # whatever it is, the next answer may be right
                if explain_once is not None:
                    tell(explain_once(f"{type(error).__name__}: {error}"))
                    explain_once = None
            if stop.wait(pause()):
                return

    threading.Thread(target=run, name=name, daemon=True).start()
