"""What a rank has to say, by signal, watcher, grace period and time limit."""

import gc
import math
import re
import signal
import threading
import time
from collections.abc import Callable

import pytest

from mpistrat.cluster_resolver.slurm.job import SlurmJob
from mpistrat.fault_tolerance import TerminationConfig, announced_end
from mpistrat.fault_tolerance.announced_end import (
    NOTHING,
    SAVE,
    SAVE_AND_LEAVE,
    AnnouncedEnd,
    level_of,
    reason_of,
)
from mpistrat.fault_tolerance.platform_device import PlatformDevice
from mpistrat.fault_tolerance.termination_config import completed

QUIET = {"signals": (), "end_time": math.inf}


def end_of(*, keeps_time: bool = True, **settings: object) -> AnnouncedEnd:
    config = TerminationConfig(**{**QUIET, **settings})  # type: ignore[arg-type]
    return AnnouncedEnd(completed(config, PlatformDevice.INTERNAL_CPU), None, keeps_time)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_nothing() -> None:
    assert end_of().word() == NOTHING
    assert end_of(end_time=time.time() + 3600).word() == NOTHING


def test_a_signal() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    try:
        end = end_of(signals=["SIGUSR1"])
        signal.raise_signal(signal.SIGUSR1)
        assert level_of(end.word()) == SAVE_AND_LEAVE
        assert reason_of(end.word()) == "SIGUSR1 has come"
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_time_limit_needs_time_for_steps_and_checkpoints() -> None:
    left = time.time() + 100
    end = end_of(end_time=left, margin=10)
    assert end.word() == NOTHING
    end.seconds_to_save = 50
    assert level_of(end.word()) == SAVE_AND_LEAVE
    end.seconds_to_save = 20
    assert end.word() == NOTHING
    end.steps.longest = 30
    assert level_of(end.word()) == SAVE_AND_LEAVE
    assert reason_of(end.word()) == "the end is near"


@pytest.mark.parametrize(
    ("margin", "seconds", "kept"),
    [
        *((60, 0.0, 50), (200, 0.0, 50), (40, 0.0, 40)),  # nothing is measured
        *((60, 1.0, 12), (5, 1.0, 7), (60, 20.0, 60), (60, 30.0, 90)),
    ],
)
def test_the_margin_is_what_checkpoints_take(
    monkeypatch: pytest.MonkeyPatch, margin: float, seconds: float, kept: float
) -> None:
    """Of 100 s: at most half of them before a checkpoint is measured, and then a tenth, or a checkpoint's time."""
    now = 1000.0
    monkeypatch.setattr(time, "time", lambda: now)
    end = end_of(end_time=now + 100, margin=margin)
    end.takes_to_save(seconds)
    assert end.word() == NOTHING
    now += 100 - kept - 0.01
    assert end.word() == NOTHING
    now += 0.02
    assert level_of(end.word()) == SAVE_AND_LEAVE
    elsewhere = end_of(end_time=now, margin=margin, keeps_time=False)
    assert elsewhere.word() == NOTHING


def test_a_near_limit_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    end_of(end_time=time.time() + 3600).warn_if_near()
    end_of(end_time=time.time() + 7, keeps_time=False).warn_if_near()
    assert capsys.readouterr().err == ""
    end = end_of(end_time=time.time() + 70)
    end.takes_to_save(2.0)
    for _ in range(2):
        end.warn_if_near()
        end.word()
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(r"limit is near, in (69\.\d|70) s\. 11 s of these are kept", line)
    assert "which leaves 59 s to train" in line
    assert line.endswith("margin=...), which is 60 s")


def test_a_near_limit_that_slurm_says_later(capsys: pytest.CaptureFixture[str]) -> None:
    may_answer = threading.Event()

    class Job(SlurmJob):
        def ask_end_time(self, seconds: float) -> float:
            assert may_answer.wait(30)
            return time.time() + 70

    config = TerminationConfig(signals=())
    end = AnnouncedEnd(completed(config, PlatformDevice.INTERNAL_CPU), Job("17"), True)
    end.warn_if_near()
    assert end.word() == NOTHING
    assert capsys.readouterr().err == ""
    may_answer.set()
    said: list[str] = []
    until(lambda: end.word() == NOTHING and bool(said.append(capsys.readouterr().err) or said[-1]))
    assert said[-1].count("the time limit is near") == 1
    assert end.word() == NOTHING
    assert capsys.readouterr().err == ""


def test_a_grace_period() -> None:
    end = end_of(termination_watcher_fn=lambda: True, grace_period=100)
    until(lambda: level_of(end.word()) == SAVE)
    assert end.begin_grace()
    assert not end.begin_grace()
    assert end.word() == NOTHING
    end.steps.mean = 16.0
    assert end.word() == NOTHING
    end.seconds_to_save = 10.0
    assert level_of(end.word()) == SAVE_AND_LEAVE


def test_a_watcher_is_asked_until_it_says_true(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(announced_end, "SECONDS_BETWEEN_POLLS", 0.01)
    answers = iter([False, OSError("no server"), OSError("no server"), False, True])
    asked = []

    def watcher() -> bool:
        answer = next(answers)
        asked.append(answer)
        if isinstance(answer, OSError):
            raise answer
        return answer

    end = end_of(termination_watcher_fn=watcher)
    until(lambda: level_of(end.word()) == SAVE_AND_LEAVE)
    assert len(asked) == 5
    assert capsys.readouterr().err.count("no server") == 1


def test_nobody_is_asked_for_an_end_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announced_end, "SECONDS_BETWEEN_POLLS", 0.01)
    before = set(threading.enumerate())
    end = end_of(termination_watcher_fn=lambda: False)
    (thread,) = set(threading.enumerate()) - before
    del end
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


def test_step_times(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 2.0, 12.0, *(13.0 + i for i in range(300))])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    steps = announced_end.StepTimes()
    steps.step()
    assert (steps.mean, steps.longest) == (0, 0)
    for _ in range(3):
        steps.step()
    assert (steps.mean, steps.longest) == (4.0, 10.0)
    for _ in range(300):
        steps.step()
    assert steps.longest == 1.0
