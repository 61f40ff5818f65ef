"""Whether this rank knows of the program's end: by a signal, by the user's watcher, or by the time limit."""

from __future__ import annotations

import signal
import threading
import time
import weakref
from collections.abc import Callable

from mpistrat.cluster_resolver.slurm_job import SlurmJob
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


class AnnouncedEnd:
    """
    Args:
        config: completed.
        job: the Slurm job, None outside Slurm.
        keeps_time: whether this rank watches the time limit: one of all does, so that clocks need not agree.

    Attributes:
        steps: to be told of each step.
        seconds_to_save: the longest save so far.
    """

    def __init__(self, config: TerminationConfig, job: SlurmJob | None, keeps_time: bool) -> None:
        assert config.grace_period is not None
        self.steps = StepTimes()
        self.seconds_to_save = 0.0
        self._grace_period, self._margin = config.grace_period, config.margin
        self._grace_began: float | None = None
        self._signal = SignalFlag(config.signal_numbers())
        self._limit = TimeLimit(job, config.end_time) if keeps_time else None
        self._watcher = _Watcher()
        if config.termination_watcher_fn is not None:
            self._watcher.begin(config.termination_watcher_fn)

    def takes_to_save(self, seconds: float) -> None:
        """A checkpoint was written, or read, in so many seconds."""
        self.seconds_to_save = max(seconds, self.seconds_to_save)

    def word(self) -> int:
        """What this rank has to say, and the signal that it got."""
        number = self._signal.number
        level = NOTHING
        if self._grace_began is not None:
            if time.monotonic() - self._grace_began >= self._grace_period - self._seconds_to_end():
                level = SAVE_AND_LEAVE
        elif number or self._watcher.has_seen_it:
            level = SAVE if self._grace_period else SAVE_AND_LEAVE
        if level < SAVE_AND_LEAVE and self._limit is not None:
            # The step under way goes on to its end, and at that end the next one may be found to be too long.
            needed = self._margin + 2 * (self.steps.longest + self.seconds_to_save)
            if self._limit.seconds_left() <= needed:
                level, number = SAVE_AND_LEAVE, 0
        return level << _LEVEL_SHIFT | number if level else 0

    def begin_grace(self) -> bool:
        """All ranks know; returns whether that is news."""
        if self._grace_began is not None:
            return False
        self._grace_began = time.monotonic()
        return True

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


class _Watcher:
    """Asks the user's function once a second, on a thread of its own, until it says True."""

    def __init__(self) -> None:
        self.has_seen_it = False

    def begin(self, watcher: Callable[[], bool]) -> None:
        stop = threading.Event()
        weakref.finalize(self, stop.set)
        threading.Thread(
            target=_poll,
            args=(watcher, weakref.ref(self), stop),
            name="mpistrat termination watcher",
            daemon=True,
        ).start()


def _poll(watcher: Callable[[], bool], of: weakref.ref[_Watcher], stop: threading.Event) -> None:
    told = False
    seen = False
    while not seen:
        try:
            seen = bool(watcher())
        except Exception as error:
            if not told:
                told = True
                tell(
                    "the termination watcher fails, and will be asked again: "
                    f"{type(error).__name__}: {error}"
                )
        if stop.wait(0 if seen else SECONDS_BETWEEN_POLLS):
            return
    owner = of()
    if owner is not None:
        owner.has_seen_it = True
