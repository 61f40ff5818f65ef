"""Replays training loops that a signal interrupts, and the defaults of a TerminationConfig."""

from __future__ import annotations

import contextlib
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import mpistrat as ms
from conformance.outcomes import CannotInterpret, Failed, attempt
from conformance.stage import Handler, Stage
from mpistrat.cluster_resolver import ClusterSpec, SimpleClusterResolver
from mpistrat.fault_tolerance.platform_device import PlatformDevice
from mpistrat.fault_tolerance.termination_config import completed

SECONDS_TO_BE_ASKED = 20.0  # the handler asks once a second


@contextlib.contextmanager
def _surroundings() -> Iterator[str]:
    """A folder for checkpoints; signals are handled as before afterwards."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield folder
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Watcher:
    """A `termination_watcher_fn`: says that the end is near once it is told."""

    def __init__(self) -> None:
        self._is_near, self._was_said = threading.Event(), threading.Event()

    def __call__(self) -> bool:
        if self._is_near.is_set():
            self._was_said.set()
        return self._is_near.is_set()

    def tell(self) -> None:
        """Returns when the handler's thread has asked, and knows."""
        self._is_near.set()
        assert self._was_said.wait(SECONDS_TO_BE_ASKED), "termination_watcher_fn was not asked"
        time.sleep(0.1)


class _Program:
    """One start of the recorded training program: a variable that each step adds 1 to."""

    def __init__(self, stage: Stage, folder: str, **config: Any) -> None:
        self.events: list[str] = []
        self.own_saves = 0
        if stage.program.get("save_fn"):
            config["save_fn"] = self._save
        with ms.OneDeviceStrategy("cpu:0").scope():  # each rank is a job of its own
            self.v = ms.Variable(0)
        self.manager = ms.checkpoint.CheckpointManager(
            ms.checkpoint.Checkpoint(v=self.v), folder, keep=1
        )
        arguments: tuple[Any, ...] = (self.manager.checkpoint, folder)
        if stage.program.get("checkpoint") == "CheckpointManager":
            arguments = (self.manager, None)
        self.handler = ms.experimental.PreemptionCheckpointHandler(
            SimpleClusterResolver(ClusterSpec({})),
            *arguments,
            ms.experimental.TerminationConfig(exit_fn=self._leave, **config),
        )

    def _save(self, *args: Any, **kwargs: Any) -> Any:
        self.own_saves += 1
        return self.manager.save(*args, **kwargs)

    def _leave(self) -> None:
        self.events.append("exit")
        raise SystemExit

    def value(self) -> int:
        return int(self.v.read_value())

    def step(self) -> int:
        self.v.assign_add(1)
        return self.value()


def _loop(stage: Stage) -> dict[str, Any]:
    total, term_at = stage.inputs["total"], stage.inputs["term_at"]
    grace = stage.program.get("grace_period")
    seconds = stage.program.get("step_seconds", 0)
    returns = []
    watcher = _Watcher() if _has_watcher(stage.program) else None
    with _surroundings() as folder:
        first = _Program(stage, folder, grace_period=grace, termination_watcher_fn=watcher)

        def step() -> int:
            time.sleep(seconds)
            return first.step()

        with contextlib.suppress(SystemExit):
            for index in range(total):
                if index == term_at:
                    watcher.tell() if watcher else signal.raise_signal(signal.SIGTERM)
                if stage.program["via"] == "run":
                    returns.append(first.handler.run(step))
                else:
                    returns.append(step())
                    first.handler.save_checkpoint_if_preempted()
        found = {
            "steps_executed": first.value(),
            "events": first.events,
            "total_run_calls": first.handler.total_run_calls,
            "num_checkpoints": len(first.manager.checkpoints),
            "returns": returns,
        }
        if not first.manager.checkpoints:
            return found
        if stage.program.get("save_fn"):
            assert first.own_saves == len(first.manager.checkpoints), "save_fn was not called"
        second = _Program(stage, folder)
        restored = {
            "restored_v": second.value(),
            "restored_total_run_calls": second.handler.total_run_calls,
        }
    if grace is None:
        return {**found, **restored}
    return {
        "num_checkpoints": found["num_checkpoints"],
        "exited": found["events"] == ["exit"],
        "trained_past_first_checkpoint": found["steps_executed"] > term_at + 1,
        "restored_equals_last_step": restored["restored_v"] == found["steps_executed"],
    }


def _has_watcher(program: dict[str, Any]) -> bool:
    """Whether a watcher announces the end, in the place of a signal."""
    named = any(program.get(name) for name in ("watcher_fn", "termination_watcher_fn"))
    return named or "watcher" in program.get("signal", "")


def _constructor(stage: Stage) -> None:
    cluster = ClusterSpec(stage.program.get("cluster", {}))
    with _surroundings() as folder:
        folder = stage.program.get("checkpoint_dir", folder)
        checkpoint = ms.checkpoint.Checkpoint(v=ms.Variable(0))
        ms.experimental.PreemptionCheckpointHandler(
            SimpleClusterResolver(cluster), checkpoint, folder
        )
    raise CannotInterpret("a constructor that succeeds")


def _run_args(stage: Stage) -> dict[str, Any]:
    with _surroundings() as folder:
        handler = _Program(stage, folder).handler
        return {"value": handler.run(lambda a, b, *, c: a + b * c, 1, 2, c=3)}


def _run_of_failing_function(stage: Stage) -> dict[str, Any]:
    with _surroundings() as folder:
        handler = _Program(stage, folder).handler
        outcome = attempt(lambda: handler.run(lambda: 1 // 0))
        assert isinstance(outcome, Failed), "the error did not come out of run"
        return {
            "propagated": type(outcome.error).__name__,
            "total_run_calls": handler.total_run_calls,
        }


def _config_fields(stage: Stage) -> dict[str, Any]:
    config = ms.experimental.TerminationConfig(**stage.inputs)
    names = ("termination_watcher_fn", "exit_fn", "grace_period", "save_fn")
    return {name: getattr(config, name) for name in names}


def _defaults(stage: Stage) -> dict[str, Any]:
    values = stage.inputs["config"]
    config = None if values is None else ms.experimental.TerminationConfig(**values)
    full = completed(config, PlatformDevice[stage.program["platform"]])
    return {
        "grace_period": full.grace_period,
        "has_watcher": full.termination_watcher_fn is not None,
        "default_exit_code": _exit_code(full.exit_fn),
        "save_fn": full.save_fn,
    }


def _exit_code(leave: Callable[[], Any] | None) -> Any:
    assert leave is not None
    try:
        leave()
    except SystemExit as left:
        return left.code
    return None


def _watcher(stage: Stage) -> dict[str, Any]:
    watcher = ms.experimental.PreemptionWatcher()
    return {
        "preemption_message": watcher.preemption_message,
        "block_until_worker_exit_returns": watcher.block_until_worker_exit(),
    }


HANDLERS: dict[str, Handler] = {
    "preemption_loop": _loop,
    "PreemptionCheckpointHandler": _constructor,
    "handler.run forwards args/kwargs": _run_args,
    "handler.run of a failing function": _run_of_failing_function,
    "TerminationConfig()": _config_fields,
    "termination_config_defaults": _defaults,
    "PreemptionWatcher on CPU platform": _watcher,
}
