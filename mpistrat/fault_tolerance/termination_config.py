"""The user's choices about the end of a job: how it is announced, and how the program ends."""

from __future__ import annotations

import dataclasses
import functools
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mpistrat.cluster_resolver.metadata_server import read_metadata
from mpistrat.fault_tolerance.platform_device import PlatformDevice

# Keys of the metadata server, each with the value that announces the end.
_ANNOUNCEMENTS = (
    ("instance/maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE"),
    ("instance/preempted", "TRUE"),
)
SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2")
_NEVER_HANDLED = (signal.SIGKILL, signal.SIGSTOP)  # the kernel does not let a program handle them


def maintenance_is_near() -> bool:
    """Whether the metadata server says that this machine will be ended. Raises: OSError if no server answers in 7 s."""
    return any(
        (read_metadata(what) or "").strip() == announced for what, announced in _ANNOUNCEMENTS
    )


@dataclasses.dataclass(frozen=True)
class TerminationConfig:
    """How the end of a job is announced, and how the program ends. None is the platform's default.

    Attributes:
        termination_watcher_fn: function without arguments that returns True when the end is near. A thread of each rank
            calls it once a second until it returns True.
        exit_fn: ends the program after the checkpoint is written, on all ranks. The default is `sys.exit(42)`; on
            Google Compute Engine it is `sys.exit(143)`.
        grace_period: seconds to go on training after the first checkpoint; a second checkpoint is written at their end.
            With 0 the program leaves after the first checkpoint.
        save_fn: function that writes the checkpoint instead of the manager. All ranks call it with the arguments of
            `save_checkpoint_if_preempted`.
        signals: names or numbers of the signals that announce the end, in addition to the watcher. A "SIGINT" among
            them does not raise KeyboardInterrupt any more.
        requeue: whether Slurm puts the job back into the queue (`scontrol requeue`) when the program leaves.
        end_time: when the job will be ended, in seconds since 1970, for schedulers other than Slurm. `math.inf` ignores
            the time limit. None asks Slurm, in a Slurm job.
        margin: seconds to keep free before the time limit, for durations that are not measured yet. The last checkpoint
            begins when the time left is the margin plus twice the longest checkpoint and twice the longest of the last
            steps (each step forgets 1 % of it). The margin is cut to half of the time before the limit. After a
            checkpoint was written or read, it is cut to a tenth of that time, or to the duration of the longest
            checkpoint if that is longer.
    Raises: TypeError for a value of another type; ValueError for negative seconds or an unknown signal.

    Example:
        >>> config = ms.fault_tolerance.TerminationConfig(signals=["SIGUSR1"], margin=120.0, requeue=True)
        >>> config.margin, config.signal_numbers()  # the number of SIGUSR1 on Linux
        (120.0, (10,))
        >>> ms.fault_tolerance.TerminationConfig(grace_period=-1)
        Traceback (most recent call last):
        ValueError: grace_period must be 0 or more seconds, got -1
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
        """Return the numbers of `signals`, in the same order; on Linux (15, 10, 12) by default."""
        return tuple(_number(name) for name in self.signals)


class _Defaults(NamedTuple):
    watcher: Callable[[], bool] | None
    exit_fn: Callable[[], Any]
    grace_period: float


def _go_on() -> None:
    """Do nothing, so that the program goes on."""


# The same defaults as TensorFlow's.
_EXIT = functools.partial(sys.exit, 42)
_EXIT_OF_GCE = functools.partial(sys.exit, 143)
_DEFAULTS = {
    PlatformDevice.INTERNAL_CPU: _Defaults(None, _EXIT, 0),
    PlatformDevice.INTERNAL_GPU: _Defaults(None, _EXIT, 0),
    PlatformDevice.INTERNAL_TPU: _Defaults(None, _go_on, 0),
    PlatformDevice.GCE_CPU: _Defaults(maintenance_is_near, _EXIT_OF_GCE, 0),
    PlatformDevice.GCE_GPU: _Defaults(maintenance_is_near, _EXIT_OF_GCE, 3600),
    PlatformDevice.GCE_TPU: _Defaults(maintenance_is_near, _EXIT_OF_GCE, 0),
}


def completed(config: TerminationConfig | None, platform: PlatformDevice) -> TerminationConfig:
    """Return a copy of `config` with the defaults of `platform` in place of None. `config` None is all defaults."""
    config = config or TerminationConfig()
    watcher, exit_fn, grace_period = _DEFAULTS[platform]
    if config.grace_period is not None:
        grace_period = config.grace_period
    return dataclasses.replace(
        config,
        termination_watcher_fn=config.termination_watcher_fn or watcher,
        exit_fn=config.exit_fn or exit_fn,
        grace_period=grace_period,
    )


def _number(name: str | int) -> int:
    """Return the number of a signal that is given as "SIGUSR1", "USR1", signal.SIGUSR1 or 10.

    Raises: ValueError if `name` is no signal, or a signal that no program can handle (SIGKILL, SIGSTOP).
    """
    try:
        number = (
            signal.Signals[f"SIG{name.removeprefix('SIG')}"]
            if isinstance(name, str)
            else signal.Signals(name)
        )
    except (KeyError, ValueError):
        raise ValueError(f"signals must be names or numbers of signals, got {name!r:.60}") from None
    if number in _NEVER_HANDLED:
        raise ValueError(f"signals must be signals that a program can handle, got {name!r:.60}")
    return int(number)
