"""Whether this rank knows of the program's end: by a signal, by the user's watcher, or by the time limit."""

from __future__ import annotations

import functools
import signal
import threading
import time
from collections.abc import Callable

from mpistrat.cluster_resolver.slurm.job import SlurmJob
from mpistrat.fault_tolerance.polling import keep_asking
from mpistrat.fault_tolerance.signal_flag import SignalFlag
from mpistrat.fault_tolerance.step_times import StepTimes
from mpistrat.fault_tolerance.termination_config import TerminationConfig
from mpistrat.fault_tolerance.time_limit import TimeLimit

# What a rank has to say; the greatest of all ranks counts.
NOTHING, SAVE, SAVE_AND_LEAVE = 0, 1, 2
_LEVEL_SHIFT = 8  # below it, the number of the signal
SECONDS_BETWEEN_POLLS = 1.0
# As TensorFlow has it: so many mean steps before the end of the grace period, the last checkpoint is written.
_STEPS_BEFORE_THE_END = 6


class AnnouncedEnd:
    """
    Args:
        config: completed.
        job: the Slurm job, None outside Slurm.
        keeps_time: whether this rank watches the time limit: one of all does, so that clocks need not agree.

    Attributes:
        steps: how long they take; it is called at each step.
        seconds_to_save: the longest save so far.
    """

    def __init__(self, config: TerminationConfig, job: SlurmJob | None, keeps_time: bool) -> None:
        self.steps = StepTimes()
        self.seconds_to_save = 0.0
        self._grace_period, self._margin = config.grace_period or 0.0, config.margin
        self._grace_began: float | None = None
        self._signal = SignalFlag(config.signal_numbers())
        self._limit = TimeLimit(job, config.end_time) if keeps_time else None
        self._is_near = threading.Event()  # the user's function has said so
        if config.termination_watcher_fn is not None:
            keep_asking(
                self,
                "mpistrat termination watcher",
                functools.partial(_ask_watcher, config.termination_watcher_fn, self._is_near),
                lambda: SECONDS_BETWEEN_POLLS,
                "the termination watcher fails, and will be asked again: {}".format,
            )

    def takes_to_save(self, seconds: float) -> None:
        """A checkpoint was written, or read, in so many seconds."""
        self.seconds_to_save = max(seconds, self.seconds_to_save)

    def word(self) -> int:
        """What this rank has to say, and the signal that came."""
        number = self._signal.number
        level = NOTHING
        if self._grace_began is not None:
            if time.monotonic() - self._grace_began >= self._grace_period - self._seconds_to_end():
                level = SAVE_AND_LEAVE
        elif number or self._is_near.is_set():
            level = SAVE if self._grace_period else SAVE_AND_LEAVE
        if level < SAVE_AND_LEAVE and self._limit is not None:
            # The step under way goes on to its end, and at that end the next one may be found to be too long.
            needed = self._margin + 2 * (self.steps.longest + self.seconds_to_save)
            if self._limit.seconds_left() <= needed:
                level, number = SAVE_AND_LEAVE, 0
        return level << _LEVEL_SHIFT | number if level else 0

    def begin_grace(self) -> bool:
        """All ranks know of the end. Returns: whether that is news."""
        is_news = self._grace_began is None
        if is_news:
            self._grace_began = time.monotonic()
        return is_news

    def _seconds_to_end(self) -> float:
        return _STEPS_BEFORE_THE_END * self.steps.mean + self.seconds_to_save


def level_of(word: int) -> int:
    return word >> _LEVEL_SHIFT


def reason_of(word: int) -> str:
    """Why, for people."""
    number = word & (1 << _LEVEL_SHIFT) - 1
    if number:
        return f"{signal.Signals(number).name} has come"
    return "the end is near"


def _ask_watcher(watcher: Callable[[], bool], is_near: threading.Event) -> bool:
    if watcher():
        is_near.set()
    return is_near.is_set()
