"""Signals that announce a job's end, and come before the program has said what it does about them.

Between a strategy and its PreemptionCheckpointHandler a program reads its data. Signals that come meanwhile are kept
for the handler. Without one, they have their effect at the first step.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
from typing import Any

# SIGTERM is none of them: it ends whatever has no handler, at once.
NUMBERS = (signal.SIGUSR1, signal.SIGUSR2)

# By signal that is kept: SIG_DFL, or a function that calls the handler of MPI, which calls the one before it.
_previous: dict[int, Any] = {}
kept: set[int] = set()  # those without a handler, until a step begins
_come: set[int] = set()


def keep() -> None:
    """Keep them from now on, unless the program handles them. On other threads than the main thread nothing is kept."""
    for number in NUMBERS:
        if (before := _action(number)) is not None:
            with contextlib.suppress(ValueError):  # on another thread
                _previous[number] = before
                signal.signal(number, _note)
                kept.update([number] if before == signal.SIG_DFL else ())


def previous(number: int) -> Any:
    """What handles the signal, apart from this file."""
    handler = signal.getsignal(number)
    return _previous.get(number, signal.SIG_DFL) if handler is _note else handler


def heard(numbers: frozenset[int]) -> int:
    """Those of `numbers` that have come are now the caller's. Returns: one of them; 0: none has come."""
    found = _come & numbers
    _come.difference_update(found)
    return max(found, default=0)


def release() -> None:
    """A step begins: what ends a program without a handler does so from now on, and if it has come."""
    for number in [*kept]:
        with contextlib.suppress(ValueError):  # on another thread: at a later step
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
    """SIG_DFL; a function that calls MPI's handler, where MPI has one; None where the program handles the signal."""
    if signal.getsignal(number) != signal.SIG_DFL:  # MPI's handler calls the program's
        return None
    libc, action, owner = ctypes.CDLL(None), (ctypes.c_void_p * 32)(), (ctypes.c_char_p * 4)()
    # A struct sigaction begins with the handler, whoever has set it; a Dl_info with the file that has it.
    libc.sigaction(number, None, action)
    libc.dladdr(ctypes.c_void_p(action[0]), owner)
    if b"/libmpi" in (owner[0] or b""):
        of_mpi = ctypes.CFUNCTYPE(None, ctypes.c_int)(action[0] or 0)
        return lambda number, frame: of_mpi(number)
    return None if action[0] else signal.SIG_DFL
