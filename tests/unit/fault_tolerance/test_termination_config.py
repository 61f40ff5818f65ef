"""Defaults by platform, and what is refused."""

import signal
from typing import Any

import pytest

from mpistrat.fault_tolerance import TerminationConfig
from mpistrat.fault_tolerance.platform_device import PlatformDevice
from mpistrat.fault_tolerance.termination_config import completed


def test_nothing_is_decided_by_default() -> None:
    config = TerminationConfig()
    values = (config.termination_watcher_fn, config.exit_fn, config.grace_period, config.save_fn)
    assert values == (None, None, None, None)


def test_what_is_given_stays() -> None:
    def function() -> bool:
        return True

    config = TerminationConfig(function, function, 7, function, requeue=True)
    for platform in PlatformDevice:
        assert completed(config, platform) == config


@pytest.mark.parametrize(
    ("platform", "code"), [(PlatformDevice.INTERNAL_CPU, 42), (PlatformDevice.GCE_GPU, 143)]
)
def test_exit_codes(platform: PlatformDevice, code: int) -> None:
    leave = completed(None, platform).exit_fn
    assert leave is not None
    with pytest.raises(SystemExit) as left:
        leave()
    assert left.value.code == code


def test_signals_by_name_and_number() -> None:
    config = TerminationConfig(signals=["SIGUSR1", "USR2", signal.SIGHUP, 15])
    expected = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGTERM)
    assert config.signal_numbers() == expected
    assert TerminationConfig(signals=()).signal_numbers() == ()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"exit_fn": 42}, TypeError),
        ({"grace_period": "1"}, TypeError),
        ({"grace_period": -1}, ValueError),
        ({"grace_period": float("nan")}, ValueError),
        ({"margin": None}, TypeError),
        ({"signals": ["SIGNOTHING"]}, ValueError),
        ({"signals": [0]}, ValueError),
        ({"signals": ["SIGKILL"]}, ValueError),
        ({"signals": ["TERM", signal.SIGSTOP]}, ValueError),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(arguments))):
        TerminationConfig(**arguments)
