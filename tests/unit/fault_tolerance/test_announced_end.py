"""What a rank has to say, by signal, watcher, grace period and time limit."""

import gc
import math
import signal
import threading
import time
from collections.abc import Callable

import pytest

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
    assert level_of(end_of(end_time=left, margin=200).word()) == SAVE_AND_LEAVE
    assert end_of(end_time=left, margin=200, keeps_time=False).word() == NOTHING
    end = end_of(end_time=left, margin=10)
    assert end.word() == NOTHING
    end.seconds_to_save = 50
    assert level_of(end.word()) == SAVE_AND_LEAVE
    end.seconds_to_save = 20
    assert end.word() == NOTHING
    end.steps.longest = 30
    assert level_of(end.word()) == SAVE_AND_LEAVE
    assert reason_of(end.word()) == "the end is near"


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
