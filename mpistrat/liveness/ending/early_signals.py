"""Keeps signals that announce a job's end and arrive before the program has made its PreemptionCheckpointHandler.

A program that has built its strategy may read data for a while before it makes the handler. Signals that arrive
meanwhile are kept for the handler. If the program makes no handler, they take effect at the first step.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
from typing import Any

# SIGTERM is not kept: it ends a program without a handler at once.
NUMBERS = (signal.SIGUSR1, signal.SIGUSR2)

# By signal, its handler before this file's: SIG_DFL, or a function that calls the handler of the MPI library.
_previous: dict[int, Any] = {}
kept: set[int] = set()  # the signals that would end the program, until a step begins
_come: set[int] = set()  # the signals that have arrived


def keep() -> None:
    """Handle the signals `NUMBERS` from now on: note each that arrives, so that it does not end the program.

    Signals that the program handles itself stay as they are. It does nothing outside the main thread.
    Called by: each new strategy.
    """
    for number in NUMBERS:
        if (before := _action(number)) is not None:
            with contextlib.suppress(ValueError):  # this is not the main thread
                _previous[number] = before
                signal.signal(number, _note)
                if before == signal.SIG_DFL:
                    kept.add(number)


def previous(number: int) -> Any:
    """Return the handler that the signal would have without this file, as `signal.getsignal` does.

    Returns: SIG_DFL, a handler of the program, or a function that calls MPI's handler; None if a library has set a
        handler that Python does not know.
    """
    handler = signal.getsignal(number)
    if handler is _note:
        return _previous.get(number, signal.SIG_DFL)
    return handler


def heard(numbers: frozenset[int]) -> int:
    """Return the greatest signal in `numbers` that has arrived since `keep`; forget all signals of `numbers`.

    Called by: a new PreemptionCheckpointHandler.   Returns: 0 if none has arrived.
    """
    found = _come & numbers
    _come.difference_update(found)
    return max(found, default=0)


def release() -> None:
    """Stop keeping signals that had no handler before `keep`. If such a signal has arrived, it ends the program now.

    Called by: a strategy's step. Outside the main thread it does nothing, and a later step does it.
    """
    for number in [*kept]:
        with contextlib.suppress(ValueError):  # this is not the main thread
            if signal.getsignal(number) is _note:
                signal.signal(number, signal.SIG_DFL)
                kept.discard(number)
                if heard(frozenset([number])):
                    signal.raise_signal(number)


def _note(number: int, frame: Any) -> None:
    _come.add(number)
    if callable(before := _previous[number]):
        before(number, frame)


def _action(number: int) -> Any:
    """Return the signal's present handler if `keep` may replace it: SIG_DFL, or a function that calls MPI's handler.

    Returns: None if the program handles the signal, in Python or in another library than MPI.
    """
    if signal.getsignal(number) != signal.SIG_DFL:  # a handler in Python
        return None
    libc = ctypes.CDLL(None)
    action = (ctypes.c_void_p * 32)()
    owner = (ctypes.c_char_p * 4)()
    # A struct sigaction begins with the handler's address; a Dl_info begins with the name of the library at an address.
    libc.sigaction(number, None, action)
    libc.dladdr(ctypes.c_void_p(action[0]), owner)
    if b"/libmpi" in (owner[0] or b""):
        of_mpi = ctypes.CFUNCTYPE(None, ctypes.c_int)(action[0] or 0)
        return lambda number, frame: of_mpi(number)
    return None if action[0] else signal.SIG_DFL
