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
        has_explained, done = explain is None, False
        while not done:
            try:
                done = ask()
            except Exception as error:  # whatever it is, the next answer may be right
                if explain is not None and not has_explained:
                    has_explained = True
                    tell(explain(f"{type(error).__name__}: {error}"))
            if not done and stop.wait(pause()):
                return

    threading.Thread(target=run, name=name, daemon=True).start()
