"""Decides at each step whether this rank has to tell the other ranks that the job is about to be ended."""

from __future__ import annotations

import math
import signal
import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace

from mpistrat.cluster_resolver.slurm.job import SlurmJob
from mpistrat.fault_tolerance.signal_flag import SignalFlag
from mpistrat.fault_tolerance.termination_config import TerminationConfig
from mpistrat.machine.notices import tell

# The levels of a rank's word; the greatest level of all ranks counts.
NOTHING = 0
SAVE = 1
SAVE_AND_LEAVE = 2
_LEVEL_SHIFT = 8  # the bits below it are the signal's number
SECONDS_BETWEEN_POLLS = 1.0
# As in TensorFlow, the last checkpoint is written this many mean steps before the end of the grace period.
_STEPS_BEFORE_THE_END = 6
# The margin is at most this part of the time before the limit, before and after the first save or restore was timed.
# It may be as long as a checkpoint takes, even if that is more.
_PART_UNTIL_MEASURED = 0.5
_PART_WHEN_MEASURED = 0.1
# `StepTimes.longest` is multiplied by this at each step. So ten times the usual length is forgotten after 230 steps.
_REMEMBERED = 0.99
# Slurm is asked again after a tenth of the time that is left, because limits can change. These bounds are in seconds.
SHORTEST_PAUSE = 10.0
LONGEST_PAUSE = 600.0
_SECONDS_TO_ANSWER = 30.0


class AnnouncedEnd:
    """Decides from signals, the user's watcher and the time limit whether this rank asks for the last checkpoint.

    Made by: `PreemptionCheckpointHandler`. It sends `word()` to the other ranks.
    Args:
        config: a TerminationConfig that `completed` has returned.
        job: the Slurm job; None outside Slurm.
        keeps_time: whether this rank watches the time limit. Rank 0 alone does, so that clocks need not agree.
    Attributes:
        steps: durations of steps; the handler calls `steps.step()` at the end of each step.
        seconds_to_save: longest save or restore so far, in seconds; 0.0 before the first.
    """

    def __init__(self, config: TerminationConfig, job: SlurmJob | None, keeps_time: bool) -> None:
        self.steps = StepTimes()
        self.seconds_to_save = 0.0
        self._most_left = 0.0  # the most seconds that were ever left before the time limit
        self._is_limit_known = False
        self._grace_period = config.grace_period or 0.0
        self._margin = config.margin
        self._grace_began: float | None = None
        self._signal = SignalFlag(config.signal_numbers())
        self._limit = TimeLimit(job, config.end_time) if keeps_time else TimeLimit(None)
        is_near = self._is_near = threading.Event()  # set when the user's watcher has returned True
        watcher = config.termination_watcher_fn
        if watcher is not None:

            def ask() -> bool:
                if watcher():
                    is_near.set()
                return is_near.is_set()

            keep_asking(
                self,
                "mpistrat termination watcher",
                ask,
                lambda: SECONDS_BETWEEN_POLLS,
                "the termination watcher raised an error, and will be called again: {}".format,
            )

    def takes_to_save(self, seconds: float) -> None:
        """Record that writing or reading a checkpoint took `seconds`; `seconds_to_save` keeps the longest."""
        self.seconds_to_save = max(seconds, self.seconds_to_save)

    def word(self) -> int:
        """Return this rank's word for the step: an int that tells the other ranks to save; 0 if there is no reason to.

        The ranks take the MAX of their words. Its upper bits are a level (`level_of`), its lower 8 bits the number of
        the signal that arrived, or 0. SAVE begins a grace period: training goes on after the checkpoint. The level is
        SAVE_AND_LEAVE near the end of that period, near the time limit, or without a grace period.
        """
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
                level = SAVE_AND_LEAVE
                number = 0
        if level == NOTHING:
            return 0
        return level << _LEVEL_SHIFT | number

    def begin_grace(self) -> bool:
        """Start the grace period. Returns: True; False if it had begun already, and then nothing changes."""
        if self._grace_began is not None:
            return False
        self._grace_began = time.monotonic()
        return True

    def warn_if_near(self) -> None:
        """Warn on stderr if the margin and two checkpoints would take more than half of the time before the limit.

        The check is made once, at the first call after the time limit is known.
        """
        left = self._seconds_left()
        meant = self._margin + 2 * self.seconds_to_save
        if self._is_limit_known or not math.isfinite(left):
            return
        self._is_limit_known = True
        if meant > _PART_UNTIL_MEASURED * left:
            kept = self._seconds_needed()
            to_train = max(left - kept, 0)
            tell(
                f"warning: the time limit is near, in {left:.3g} s. {kept:.3g} s of these are kept for the last "
                f"checkpoint, which leaves {to_train:.3g} s to train. Ask for a longer time limit, or set "
                f"TerminationConfig(margin=...), which is {self._margin:g} s"
            )

    def _seconds_left(self) -> float:
        """Return the seconds until the time limit; inf if no limit is known."""
        left = self._limit.seconds_left()
        if math.isfinite(left):
            self._most_left = max(left, self._most_left)
        return left

    def _seconds_needed(self) -> float:
        """Return the seconds before the time limit at which a rank must save.

        This is the margin plus twice the longest of the last steps plus twice the longest checkpoint.
        `TerminationConfig.margin` says how the margin is cut in a short job.
        """
        part = _PART_WHEN_MEASURED if self.seconds_to_save else _PART_UNTIL_MEASURED
        margin = min(self._margin, max(part * self._most_left, self.seconds_to_save))
        return margin + 2 * (self.steps.longest + self.seconds_to_save)


def level_of(word: int) -> int:
    return word >> _LEVEL_SHIFT


def reason_of(word: int) -> str:
    """Return a text with the reason in the ranks' greatest word: "SIGTERM has come", or "the end is near"."""
    number = word & (1 << _LEVEL_SHIFT) - 1
    if number:
        return f"{signal.Signals(number).name} has come"
    return "the end is near"


class StepTimes:
    """The times from the end of one step to the end of the next, in seconds, with the time for reading input.

    Attributes:
        mean: mean of all times; 0.0 before the second step.
        longest: longest of the last times. It shrinks by 1 % at each step, until a longer time comes. 0.0 before the
            second step.
    """

    def __init__(self) -> None:
        self.mean = 0.0
        self.longest = 0.0
        self._intervals = 0
        self._last: float | None = None

    def step(self) -> None:
        """Record the time since the last call. Called once in each step, always at the same place."""
        now = time.monotonic()
        if self._last is not None:
            took = now - self._last
            self._intervals += 1
            self.mean += (took - self.mean) / self._intervals
            self.longest = max(took, _REMEMBERED * self.longest)
        self._last = now


class TimeLimit:
    """The time limit of the job. A thread asks Slurm for the limit again and again, so that no step waits for Slurm.

    Without a Slurm job, and with `end_time`, it starts no thread.

    Args:
        job: the Slurm job; None outside Slurm.
        end_time: the user's end time, in seconds since 1970; None asks Slurm.
    """

    def __init__(self, job: SlurmJob | None, end_time: float | None = None) -> None:
        end = self._end = SimpleNamespace(time=math.inf)
        if end_time is not None:
            end.time = end_time
            return
        if job is None:
            return

        def ask() -> bool:
            end.time = job.ask_end_time(_SECONDS_TO_ANSWER)
            return False

        def pause() -> float:
            tenth = (end.time - time.time()) / 10
            return min(max(tenth, SHORTEST_PAUSE), LONGEST_PAUSE)

        def explain(error: str) -> str:
            return (
                f"the time limit of job {job.job_id} is not known: {error}. Nothing is saved before the limit, "
                "unless a signal announces it (sbatch --signal), or TerminationConfig(end_time=...) gives it"
            )

        explain_failure: Callable[[str], str] | None = explain
        if job.end_time is not None:
            # Slurm has given the end time at the start of the job, so a failure to ask again is not reported.
            end.time = job.end_time
            explain_failure = None
        keep_asking(self, "mpistrat time limit", ask, pause, explain_failure)

    def seconds_left(self) -> float:
        """Return the seconds until the job is ended, negative after that; inf if no limit is known."""
        return self._end.time - time.time()


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
