"""Records the signals that announce the end of the program. The signal handler does nothing else.

If a signal handler wrote the checkpoint, each rank would save in the middle of a step, at another place.
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any

from mpistrat.liveness.ending import early_signals
from mpistrat.liveness.ending.interrupts import raises_keyboard_interrupt
from mpistrat.liveness.ending.rank_end import rank_end
from mpistrat.machine.notices import warn_on_first_rank


class SignalFlag:
    """Records signals for as long as it exists.

    After a signal is recorded, the handler that the signal had before is called. Python's own SIGINT handler is not
    called, because it would raise KeyboardInterrupt in the middle of a step. If code outside Python has set the handler
    of a signal, the signal is not recorded, and rank 0 warns.

    Made by: the main thread, because only the main thread of Python can set signal handlers.
    Args:
        signals: numbers of the signals to record. If this is empty, any thread may make the flag.
    Raises: RuntimeError on another thread than the main thread, unless `signals` is empty.
    Attributes:
        number: number of the last signal that arrived, also between the making of a strategy and of this flag; 0 if
            none has arrived.
        signals: the numbers of the signals to record, as a frozenset.
    """

    def __init__(self, signals: Sequence[int]) -> None:
        self.number = 0
        self.signals = frozenset(signals)
        if not signals:
            return
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "signal handlers can only be set on the main thread: make the PreemptionCheckpointHandler there, or "
                "give it TerminationConfig(signals=(), termination_watcher_fn=...)"
            )
        for number in signals:
            _take(number)
        _flags.add(self)
        self.number = self.number or early_signals.heard(self.signals)


_flags: weakref.WeakSet[SignalFlag] = weakref.WeakSet()
_previous: dict[int, Any] = {}  # by signal, its handler before `_arrived`
_inside: set[int] = set()  # signals that are being handled


def _take(number: int) -> None:
    before = early_signals.previous(number)
    if before is _arrived:
        return
    if before is None:
        warn_on_first_rank(
            rank_end().rank,
            f"{signal.Signals(number).name} is handled outside Python already, and keeps that handler: it will "
            "not cause a checkpoint. Choose other signals with TerminationConfig(signals=...)",
            stacklevel=4,
        )
        return
    _previous[number] = before
    signal.signal(number, _arrived)


def _arrived(number: int, frame: FrameType | None) -> None:
    """Handle a signal: set `number` of each flag that records the signal, then call the signal's earlier handler.

    If no flag records it any more, and the signal had no handler before, its default action ends the process.
    """
    if number in _inside:
        return  # a handler that was set after ours calls ours, and is now itself the previous handler
    _inside.add(number)
    try:
        heard = [flag for flag in _flags if number in flag.signals]
        for flag in heard:
            flag.number = number
        previous = _previous[number]
        if callable(previous):
            if not heard or not raises_keyboard_interrupt(previous):
                previous(number, frame)
        elif previous == signal.SIG_DFL and not heard:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
    finally:
        _inside.discard(number)


def _forget() -> None:
    """Restore the earlier signal handlers in a forked child, because signals to the child are not for this program."""
    for number, previous in _previous.items():
        if signal.getsignal(number) is _arrived:
            signal.signal(number, previous)


os.register_at_fork(after_in_child=_forget)
