"""Saves a checkpoint at a step that all ranks agree on, before the job is ended."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal, cast

import numpy as np

from mpistrat.checkpoint import Checkpoint, CheckpointManager
from mpistrat.checkpoint.checkpoint import STEPS_OF_HANDLER
from mpistrat.cluster_resolver import ClusterResolver
from mpistrat.cluster_resolver.slurm.job import SlurmError, slurm_job
from mpistrat.communicators import reducing
from mpistrat.errors import DivergenceError
from mpistrat.fault_tolerance.announced_end import NOTHING, SAVE, AnnouncedEnd, level_of, reason_of
from mpistrat.fault_tolerance.platform_device import detect_platform
from mpistrat.fault_tolerance.termination_config import TerminationConfig, completed
from mpistrat.input import DistributedDataset, DistributedIterator
from mpistrat.liveness.ending.rank_end import rank_end
from mpistrat.machine.notices import tell

_SECONDS_TO_REQUEUE = 30.0
_SERVERS = (
    "PreemptionCheckpointHandler is for strategies whose replicas step together. This cluster has parameter servers: "
    "the signal that announces the end would end them, too. Call CheckpointManager.save after every so many steps, "
    "and CheckpointManager.restore_or_initialize when the program begins"
)


class PreemptionCheckpointHandler:
    """Saves a checkpoint when the job is about to be ended, ends the program, and restores it at the next start.

    A signal, the user's watcher or the time limit of the Slurm job announces the end, on any rank at any moment. The
    rank tells the other ranks in the message before the reduction of gradients. At the end of that step all ranks
    write the checkpoint. In a step without a reduction of gradients the handler sends a MAX of 8 bytes instead. The
    program leaves before the next step, by `exit_fn`. So all work of a step must be in the function that `run` gets, or
    before `save_checkpoint_if_preempted`.

    Inside `Strategy.replica()` a program need not call these methods. A step ends when the program asks a distributed
    dataset of the checkpoint for the next batch, and the program may leave then. If the checkpoint has an optimizer,
    that ends a step only if some optimizer has stepped since the last batch, so that accumulated batches are one step.

    Made by: every rank, on the main thread, after the objects of the checkpoint are made. The constructor restores the
        newest checkpoint, if there is one.
    Args:
        cluster_resolver: the strategy's resolver, or None. It only serves to refuse parameter servers, because the
            ranks of the checkpoint's strategy take part.
        checkpoint_or_checkpoint_manager: the Checkpoint to save, or a CheckpointManager that saves it.
        checkpoint_dir: the folder for a Checkpoint. Only the newest checkpoint is kept in it. Ignored with a
            CheckpointManager.
        termination_config: a TerminationConfig, with the signs that announce the end, and how the program ends; None
            is `TerminationConfig()`.
    Raises:
        TypeError: a Checkpoint without a folder.
        ValueError: a dataset of the checkpoint has another handler.
        NotImplementedError: variables are on parameter servers.
        RuntimeError: this is not the main thread, or another job saves to the folder.
        OSError: the folder cannot be made.

    Example:
        >>> strategy = ms.OneDeviceStrategy("cpu")
        >>> model = strategy.prepare(torch.nn.Linear(2, 1))
        >>> manager = ms.checkpoint.CheckpointManager(ms.checkpoint.Checkpoint(model=model), "saved")
        >>> handler = ms.fault_tolerance.PreemptionCheckpointHandler(None, manager)
        >>> handler.run(lambda: "a step"), handler.total_run_calls
        ('a step', 1)
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None,
        checkpoint_or_checkpoint_manager: Checkpoint | CheckpointManager,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        termination_config: TerminationConfig | None = None,
    ) -> None:
        if cluster_resolver is not None and "ps" in cluster_resolver.cluster_spec().jobs:
            raise NotImplementedError(_SERVERS)
        self._manager = _manager_of(checkpoint_or_checkpoint_manager, checkpoint_dir)
        extended = self._manager.checkpoint.strategy.extended
        if not extended.checkpoints.all_take_part:
            raise NotImplementedError(_SERVERS)
        after_steps = _after_steps_of(self._manager.checkpoint)
        self._config = completed(termination_config, detect_platform())
        self._communicator = extended.communicator
        self._job = slurm_job()
        self._counter = _Counter()
        self._manager.checkpoint.objects[STEPS_OF_HANDLER] = self._counter
        if self._config.save_fn is None:
            self._manager.claim()  # an error of the folder is raised now, and not in the last minute
        # Once the last checkpoint is written: the message with which the program ends.
        self._saved: str | None = None
        self._is_over = False
        self._end = AnnouncedEnd(self._config, self._job, keeps_time=self._communicator.rank == 0)
        began = time.monotonic()
        restored = self._manager.restore_or_initialize()
        if restored is not None:  # the best estimate until a checkpoint is saved
            self._end.takes_to_save(self._longest_of_ranks(time.monotonic() - began))
            self._tell(f"goes on from {restored}", "INFO")
        self._word = PiggybackedWord(_word_of(self._end))
        self._piggybacks = extended.modules.parts.piggybacks
        self._piggybacks.append(self._word)
        self._end.warn_if_near()
        self._is_called = False  # whether the program itself marks the ends of steps
        self._optimizer_steps = _optimizer_steps_of(self._manager.checkpoint)
        self._last_count = 0
        if self._optimizer_steps is not None:
            self._last_count = self._optimizer_steps.count
        for methods in after_steps:
            methods[:] = [self._after_batch]  # the program need not keep the handler

    @property
    def total_run_calls(self) -> int:
        """Number of steps: calls of `run` and `save_checkpoint_if_preempted`, also before restarts."""
        return self._counter.calls

    def run(self, distributed_train_function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that is one step; then save a checkpoint if the end was announced.

        Called by: every rank, equally often, outside `strategy.run`. After a save, the next call ends the program
            before it calls the function. Without a next call the program ends in its own way.
        Args:
            distributed_train_function: the step; called with `args` and `kwargs`.
        Returns: the function's return value.
        Raises: the function's exception; then the step does not count.
        """
        self._is_called = True
        self._leave_if_saved()
        result = distributed_train_function(*args, **kwargs)
        self._finish_step((), {})
        return result

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """Mark the end of a step, instead of `run`. If the end was announced, save, and end the program at once.

        With a grace period, the first announcement only saves.

        Called by: every rank, equally often, outside `strategy.run`.
        Args:
            args, kwargs: arguments for `save_fn`, or else for the manager's `save`; without any, `save` gets the number
                of steps.

        Example:
            >>> model = ms.OneDeviceStrategy("cpu").prepare(torch.nn.Linear(2, 1))
            >>> checkpoint = ms.checkpoint.Checkpoint(model=model)
            >>> handler = ms.fault_tolerance.PreemptionCheckpointHandler(None, checkpoint, "saved")
            >>> with handler.watch_preemption_scope():
            ...     handler.save_checkpoint_if_preempted()  # after a step; nobody has announced the end
        """
        self._is_called = True
        self._finish_and_leave(args, kwargs)

    def _after_batch(self) -> None:
        """Finish the step, and end the program if it has saved. It does nothing if the program calls `run` itself.

        If the checkpoint has an optimizer, it also does nothing if no optimizer has stepped since the last batch.

        Called by: a distributed dataset inside `Strategy.replica()`, when the program asks for the next batch.
        """
        before = self._last_count
        if self._optimizer_steps is None:
            self._last_count += 1  # each batch is a step
        else:
            self._last_count = self._optimizer_steps.count
        if self._last_count != before and not self._is_called:
            self._finish_and_leave((), {})

    def _finish_and_leave(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._leave_if_saved()
        self._finish_step(args, kwargs)
        self._leave_if_saved()

    @contextlib.contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """A context without effect. TensorFlow's tells other ranks of an error; here ranks always learn of errors."""
        yield

    def _finish_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count the step, agree with all ranks whether to save, and save. Called by: every rank.

        Args: args, kwargs: arguments for the save.
        """
        self._counter.calls += 1
        self._end.steps.step()
        self._end.takes_to_save(self._manager.seconds_to_save)
        if self._is_over:
            return
        word = self._word.take()
        if word is None:
            words = np.array([self._end.word()], np.int64)
            self._communicator.all_reduce(words, reducing("max", "end announced"))
            word = int(words[0])
        level = level_of(word)
        if level == NOTHING:
            return
        if level == SAVE and not self._end.begin_grace():
            return
        seconds, what = self._save(args, kwargs)
        after = (
            f"{reason_of(word)}: saved {what}after {self.total_run_calls} steps, in {seconds:.1f} s"
        )
        if level == SAVE:
            self._tell(f"{after}; goes on for a grace period of {self._config.grace_period:g} s")
        else:
            self._saved = after

    def _save(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, str]:
        """Save, and wait until the checkpoint is on disk. Called by: every rank.

        Returns: the slowest rank's time in seconds; and the path and a blank for the message, or "" if `save_fn`
            returns no path.
        """
        began = time.monotonic()
        path: Any
        if self._config.save_fn is None and not args and not kwargs:
            args = (self.total_run_calls,)
        try:
            path = (self._config.save_fn or self._manager.save)(*args, **kwargs)
        except DivergenceError as error:  # the checkpoint is written, and no work may be lost
            self._tell(str(error))
            path = self._manager.latest_checkpoint
        self._manager.wait()  # until this save, perhaps with wait=False, or an earlier one is on disk
        seconds = self._longest_of_ranks(time.monotonic() - began)
        self._end.takes_to_save(seconds)
        if isinstance(path, str):
            return seconds, f"{path} "
        return seconds, ""

    def _longest_of_ranks(self, seconds: float) -> float:
        return max(self._communicator.all_gather_object(seconds, label="seconds of a checkpoint"))

    def _leave_if_saved(self) -> None:
        if self._saved is None:
            return
        self._is_over = True
        self._piggybacks.remove(self._word)
        self._tell(f"{self._saved}; the program ends")
        self._saved = None
        rank_end().flush()
        if self._communicator.size > 1:
            from mpistrat.liveness.ending.job_end import job_end

            job_end().leaves_together = True
        # All ranks have printed their lines before any rank ends.
        self._communicator.barrier(label="before the program ends")
        if self._config.requeue and self._communicator.rank == 0:
            self._requeue()
        self._communicator.barrier(label="requeued")
        cast("Callable[[], Any]", self._config.exit_fn)()  # `completed` has set it

    def _requeue(self) -> None:
        if self._job is None:
            self._tell("cannot requeue: this is no Slurm job")
            return
        try:
            self._job.requeue(_SECONDS_TO_REQUEUE)
        except SlurmError as error:
            self._tell(
                f"job {self._job.job_id} is not requeued: {error}. The batch script can do it, outside a container, "
                f"when the program has ended with its exit code: scontrol requeue {self._job.job_id}"
            )

    def _tell(self, text: str, level: Literal["INFO", "WARNING"] = "WARNING") -> None:
        """Print `text` on rank 0."""
        if self._communicator.rank == 0:
            tell(text, level)


class _Counter:
    may_be_absent = True  # a checkpoint may have been saved without a handler

    def __init__(self) -> None:
        self.calls = 0

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def state_schema(self, state: dict[str, int]) -> dict[str, range]:
        return {"calls": range(sys.maxsize)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = int(state["calls"])


def _optimizer_steps_of(checkpoint: Checkpoint) -> Any:
    """Return the `optimizer_steps()` of this process; None if the checkpoint has no optimizer."""
    if sys.modules.get("torch") is not None:
        from torch.optim import Optimizer

        if any(isinstance(value, Optimizer) for value in checkpoint.objects.values()):
            from mpistrat.pytorch.hooks import optimizer_steps

            return optimizer_steps()
    return None


def _after_steps_of(checkpoint: Checkpoint) -> list[list[Callable[[], None]]]:
    """Return the list `after_steps` of each distributed dataset of the checkpoint.

    Raises: ValueError if a list is not empty, because another handler then ends the steps and would end the program.
    """
    loaders = (DistributedDataset, DistributedIterator)
    found = [v.after_steps for v in checkpoint.objects.values() if isinstance(v, loaders)]
    if any(found):
        raise ValueError(
            "a dataset of this checkpoint has a PreemptionCheckpointHandler already. That handler would save to its "
            "folder and end the program, before this one saves. Make one handler for each dataset"
        )
    return found


def _manager_of(
    saved: Checkpoint | CheckpointManager, directory: str | os.PathLike[str] | None
) -> CheckpointManager:
    if isinstance(saved, CheckpointManager):
        return saved
    if not isinstance(saved, Checkpoint):
        raise TypeError(
            f"PreemptionCheckpointHandler takes a Checkpoint or a CheckpointManager, got {saved!r:.60}"
        )
    if not directory:
        raise TypeError(
            "PreemptionCheckpointHandler needs checkpoint_dir, the folder to save to, when it is given a Checkpoint"
        )
    return CheckpointManager(saved, directory, keep=1)


def _word_of(end: AnnouncedEnd) -> Callable[[], int]:
    """Return a function that calls `end.word()`. It holds `end` weakly, and returns 0 after `end` is gone."""
    reference = weakref.ref(end)

    def word() -> int:
        alive = reference()
        if alive is None:
            return 0
        return alive.word()

    return word


class PiggybackedWord:
    """Sends one number of each rank with each reduction of gradients. All ranks get the greatest number.

    Made by: `PreemptionCheckpointHandler`. The strategy calls `words` and `received` in each reduction.
    Args:
        ask: returns this rank's number, from 0 to 2**31 - 1. Called at each reduction of gradients.
    """

    def __init__(self, ask: Callable[[], int]) -> None:
        self._ask = ask
        self._greatest: int | None = None

    def words(self) -> np.ndarray:
        return np.array([self._ask()], np.int32)

    def received(self, greatest: np.ndarray) -> None:
        self._greatest = max(int(greatest[0]), self._greatest or 0)

    def take(self) -> int | None:
        """Return the greatest number of all ranks since the last call, equal on all ranks.

        Returns: None if no gradients were reduced since the last call.
        """
        greatest = self._greatest
        self._greatest = None
        return greatest
