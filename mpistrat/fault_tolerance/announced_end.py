"""Whether this rank knows of the program's end: by a signal, by the user's watcher, or by the time limit."""

from __future__ import annotations

import functools
import math
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
from mpistrat.machine.notices import tell

# What a rank has to say; the greatest of all ranks counts.
NOTHING, SAVE, SAVE_AND_LEAVE = 0, 1, 2
_LEVEL_SHIFT = 8  # below it, the number of the signal
SECONDS_BETWEEN_POLLS = 1.0
# As TensorFlow has it: so many mean steps before the end of the grace period, the last checkpoint is written.
_STEPS_BEFORE_THE_END = 6
# The margin is at most so much of the time before the limit, or as long as a checkpoint takes.
_PART_UNTIL_MEASURED, _PART_WHEN_MEASURED = 0.5, 0.1


class AnnouncedEnd:
    """
    Args:
        config: completed.
        job: the Slurm job, None outside Slurm.
        keeps_time: whether this rank watches the time limit: one of all does, so that clocks need not agree.

    Attributes:
        steps: how long they take; it is called at each step.
        seconds_to_save: the longest save so far; 0 before.
    """

    def __init__(self, config: TerminationConfig, job: SlurmJob | None, keeps_time: bool) -> None:
        self.steps = StepTimes()
        self.seconds_to_save = 0.0
        self._most_left = 0.0  # before the time limit
        self._is_limit_known = False
        self._grace_period, self._margin = config.grace_period or 0.0, config.margin
        self._grace_began: float | None = None
        self._signal = SignalFlag(config.signal_numbers())
        self._limit = TimeLimit(job, config.end_time) if keeps_time else TimeLimit(None)
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
            to_end = _STEPS_BEFORE_THE_END * self.steps.mean + self.seconds_to_save
            if time.monotonic() - self._grace_began >= self._grace_period - to_end:
                level = SAVE_AND_LEAVE
        elif number or self._is_near.is_set():
            level = SAVE if self._grace_period else SAVE_AND_LEAVE
        if level < SAVE_AND_LEAVE:
            self.warn_if_near()
            if self._seconds_left() <= self._seconds_needed():
                level, number = SAVE_AND_LEAVE, 0
        return level << _LEVEL_SHIFT | number if level else 0

    def begin_grace(self) -> bool:
        """All ranks know of the end. Returns: whether that is news."""
        if self._grace_began is not None:
            return False
        self._grace_began = time.monotonic()
        return True

    def warn_if_near(self) -> None:
        """Say it once, where the limit is so near that the margin would take most of the time before it."""
        left, meant = self._seconds_left(), self._margin + 2 * self.seconds_to_save
        if self._is_limit_known or not math.isfinite(left):
            return
        self._is_limit_known = True
        if meant > _PART_UNTIL_MEASURED * left:
            kept = self._seconds_needed()
            tell(
                f"warning: the time limit is near, in {left:.3g} s. {kept:.3g} s of these are kept for the last "
                f"checkpoint, which leaves {max(left - kept, 0):.3g} s to train. Ask for a longer time limit, or set "
                f"TerminationConfig(margin=...), which is {self._margin:g} s"
            )

    def _seconds_left(self) -> float:
        """inf where no limit is known."""
        left = self._limit.seconds_left()
        if math.isfinite(left):
            self._most_left = max(left, self._most_left)
        return left

    def _seconds_needed(self) -> float:
        """Before the limit, for the step under way, for one more that is found to be too long, and for the save."""
        part = _PART_WHEN_MEASURED if self.seconds_to_save else _PART_UNTIL_MEASURED
        margin = min(self._margin, max(part * self._most_left, self.seconds_to_save))
        return margin + 2 * (self.steps.longest + self.seconds_to_save)


def level_of(word: int) -> int:
    return word >> _LEVEL_SHIFT


def reason_of(word: int) -> str:
    """Why, for people."""
    number = word & (1 << _LEVEL_SHIFT) - 1
    return f"{signal.Signals(number).name} has come" if number else "the end is near"


def _ask_watcher(watcher: Callable[[], bool], is_near: threading.Event) -> bool:
    if watcher():
        is_near.set()
    return is_near.is_set()
