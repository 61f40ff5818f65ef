"""How a program learns that it is to end, and what it does then."""

from __future__ import annotations

import dataclasses
import functools
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mpistrat.fault_tolerance.google_compute_engine import maintenance_is_near
from mpistrat.fault_tolerance.platform_device import PlatformDevice

SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2")
_NEVER_HANDLED = (signal.SIGKILL, signal.SIGSTOP)  # the kernel lets no program


@dataclasses.dataclass(frozen=True)
class TerminationConfig:
    """What ends a program, and how; what is None depends on the platform.

    Attributes:
        termination_watcher_fn: asked once a second, on a thread of its own, until it returns True: the end is near.
        exit_fn: ends the program once the checkpoint is written; the default is `sys.exit(42)`, and 143 on Google
            Compute Engine. Called by all ranks.
        grace_period: seconds to go on training after the first checkpoint; a second one is written at their end. 0
            leaves after the first.
        save_fn: writes the checkpoint instead of the manager, with the arguments of `save_checkpoint_if_preempted`.
            Called by all ranks.
        signals: names or numbers of the signals that announce the end, as well as the watcher. "SIGINT" among them no
            longer raises KeyboardInterrupt.
        requeue: have Slurm put the job back into the queue (`scontrol requeue`) when it leaves.
        end_time: when the job will be ended, in seconds since 1970, for schedulers other than Slurm; `math.inf` has the
            time limit ignored. None asks Slurm, in a job of Slurm's.
        margin: seconds before the time limit that must be left when everything is written, for what is not measured
            yet, in addition to twice the longest checkpoint and the longest of the last steps (each step forgets 1 % of
            it). It is at most half of the time before the limit; once a checkpoint was written or read, a tenth, or
            what the longest took, if that is more.
    """

    termination_watcher_fn: Callable[[], bool] | None = None
    exit_fn: Callable[[], Any] | None = None
    grace_period: float | None = None
    save_fn: Callable[..., Any] | None = None
    _: dataclasses.KW_ONLY
    signals: Sequence[str | int] = SIGNALS
    requeue: bool = False
    end_time: float | None = None
    margin: float = 60.0

    def __post_init__(self) -> None:
        for name in ("termination_watcher_fn", "exit_fn", "save_fn"):
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise TypeError(f"{name} must be a function or None, got {function!r:.60}")
        for name in ("grace_period", "end_time", "margin"):
            seconds = getattr(self, name)
            if seconds is None and name != "margin":
                continue
            if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
                raise TypeError(f"{name} must be a number of seconds, got {seconds!r:.60}")
            if not seconds >= 0:
                raise ValueError(f"{name} must be 0 or more seconds, got {seconds!r}")
        self.signal_numbers()

    def signal_numbers(self) -> tuple[int, ...]:
        return tuple(map(_number, self.signals))


class _Defaults(NamedTuple):
    watcher: Callable[[], bool] | None
    exit_fn: Callable[[], Any]
    grace_period: float


def _go_on() -> None:
    """The program is not ended."""


# As TensorFlow has them.
_EXIT, _EXIT_OF_GCE = functools.partial(sys.exit, 42), functools.partial(sys.exit, 143)
_DEFAULTS = {
    PlatformDevice.INTERNAL_CPU: _Defaults(None, _EXIT, 0),
    PlatformDevice.INTERNAL_GPU: _Defaults(None, _EXIT, 0),
    PlatformDevice.INTERNAL_TPU: _Defaults(None, _go_on, 0),
    PlatformDevice.GCE_CPU: _Defaults(maintenance_is_near, _EXIT_OF_GCE, 0),
    PlatformDevice.GCE_GPU: _Defaults(maintenance_is_near, _EXIT_OF_GCE, 3600),
    PlatformDevice.GCE_TPU: _Defaults(maintenance_is_near, _EXIT_OF_GCE, 0),
}


def completed(config: TerminationConfig | None, platform: PlatformDevice) -> TerminationConfig:
    """`config` with the defaults of `platform` for what is None."""
    config = config or TerminationConfig()
    watcher, exit_fn, grace_period = _DEFAULTS[platform]
    return dataclasses.replace(
        config,
        termination_watcher_fn=config.termination_watcher_fn or watcher,
        exit_fn=config.exit_fn or exit_fn,
        grace_period=grace_period if config.grace_period is None else config.grace_period,
    )


def _number(name: str | int) -> int:
    """The number of a signal: of "SIGUSR1", "USR1", signal.SIGUSR1 or 10."""
    try:
        number = (
            signal.Signals[f"SIG{name.removeprefix('SIG')}"]
            if isinstance(name, str)
            else signal.Signals(name)
        )
    except (KeyError, ValueError):
        raise ValueError(f"signals must be names or numbers of signals, got {name!r:.60}") from None
    if number in _NEVER_HANDLED:
        raise ValueError(f"signals must be such that a program can handle, got {name!r:.60}")
    return int(number)
