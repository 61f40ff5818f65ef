"""`CheckpointManager`: saves checkpoints into a directory, keeps the newest ones, and restores them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import operator
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mpistrat.checkpoint.checkpoint import DIFFERING, Checkpoint
from mpistrat.checkpoint.directory import Directory, OpenDirectory, UnfinishedCheckpoint
from mpistrat.checkpoint.failures import on_rank, on_ranks
from mpistrat.checkpoint.followers import after_restore, load_as_follower, states_for_followers
from mpistrat.checkpoint.saving import CompletingSave, Files, ReportingSave, Saving, SavingProgress
from mpistrat.checkpoint.schema import COUNT
from mpistrat.checkpoint.shards import Assembly
from mpistrat.checkpoint.snapshots import Snapshots
from mpistrat.checkpoint.stored_checkpoint import StoredCheckpoint
from mpistrat.communicators import Communicator, RaisingOnAll
from mpistrat.context import cross_replica, require_cross_replica
from mpistrat.liveness.bounded_waits import soon
from mpistrat.machine.notices import tell, warn_on_first_rank
from mpistrat.pytorch.watch.saves import divergence_at_save

SECONDS_TO_BE_SEEN = 5.0
_LONGEST_PAUSE = 0.05

_managers: weakref.WeakSet[CheckpointManager] = weakref.WeakSet()

# A checkpoint's path, and the states for followers.
_Restored = tuple[str | None, dict[str, Any] | None]


class CheckpointManager:
    """The checkpoints of one directory: saves them, restores them, and deletes old ones.

    Each checkpoint is a folder, such as `step-00000120`. The folder gets that name when all its files are on disk, so a
    job that is killed leaves the previous checkpoint whole. Rank 0 writes the states that are equal on all ranks, and
    each rank writes its own states.

    Every rank makes a manager, and calls `claim`, `save`, `wait`, `restore` and `restore_or_initialize`, outside `run`.
    Their errors are raised on all ranks. With parameter servers one worker alone writes checkpoints: its `save` waits
    for no other rank, and raises its errors on that worker only.

    Args:
        checkpoint: the objects that are saved.
        directory: a folder on a file system that all ranks see. `claim` or the first `save` makes the folder. One job
            at a time may save into it.
        keep: number of complete checkpoints that stay: the newest.
    Raises: TypeError if `checkpoint` is no Checkpoint; ValueError if `keep` is no int from 1 on.

    Example:
        >>> model = ms.OneDeviceStrategy("cpu").prepare(torch.nn.Linear(2, 1))
        >>> manager = ms.checkpoint.CheckpointManager(ms.checkpoint.Checkpoint(model=model), "saved", keep=2)
        >>> path = manager.save(120, wait=False)  # a thread writes it
        >>> manager.wait()
        >>> manager.directory, manager.latest_checkpoint
        ('...saved', '...saved...step-00000120')

    Example:
        >>> manager = ms.checkpoint.CheckpointManager(ms.checkpoint.Checkpoint(n=ms.Variable(1)), "counts")
        >>> manager.claim()  # fails now, and not at the first save, if another job saves there
        >>> print(manager.restore_or_initialize())  # no checkpoint yet
        None
        >>> manager.restore(manager.save(1)), len(manager.checkpoints), manager.seconds_to_save > 0
        (None, 1, True)
    """

    def __init__(
        self, checkpoint: Checkpoint, directory: str | os.PathLike[str], *, keep: int = 3
    ) -> None:
        if not isinstance(checkpoint, Checkpoint):
            raise TypeError(f"checkpoint must be a Checkpoint, got {checkpoint!r:.60}")
        if not isinstance(keep, int) or keep < 1:
            raise ValueError(f"keep must be a number of checkpoints, at least 1, got {keep!r}")
        self.checkpoint = checkpoint
        self._directory = Directory(directory)
        self._keep = keep
        self._role = checkpoint.strategy.extended.checkpoints
        self._communicator = checkpoint.strategy.extended.communicator
        self._snapshots = Snapshots()
        self._saving: Saving | None = None
        self._claimed = False
        self._rank0_directory: OpenDirectory | None = None  # None on other ranks than 0
        self._seconds_to_save = 0.0  # of earlier saves
        _managers.add(self)
        _report_unraised_at_exit()

    @property
    def directory(self) -> str:
        """Path of the folder that has the checkpoints. `claim` or the first `save` makes the folder."""
        return self._directory.path

    @property
    def checkpoints(self) -> list[str]:
        """Paths of the complete checkpoints, oldest first, as this rank sees them now. Not collective."""
        return [path for path, _ in self._directory.checkpoints()[0]]

    @property
    def latest_checkpoint(self) -> str | None:
        """Path of the newest complete checkpoint, as this rank sees it now; None if there is none. Not collective."""
        return next(reversed(self.checkpoints), None)

    @property
    def seconds_to_save(self) -> float:
        """Longest duration of a save, in seconds, from the call of `save` until its files were on disk; 0.0 at first.

        A save counts with this rank's time; after `wait`, with the slowest rank's time. Saves that failed do not count.
        Not collective.
        """
        longest = self._seconds_to_save
        if self._saving is not None:
            longest = max(longest, self._saving.seconds)
        return longest

    def claim(self) -> None:
        """Make the directory, and lock it for this job, now instead of at the first `save`.

        It does nothing if the manager has the lock already, or on a worker that does not save.

        Called by: every rank.
        Raises: RuntimeError if another job saves there; FileNotFoundError if a rank does not see the directory;
            OSError.
        """
        communicator = self._communicator
        require_cross_replica(self.checkpoint.strategy, "CheckpointManager.claim")
        if self._claimed or not self._role.saves:
            return
        sample = ""
        with self._naming_rank(f"could not claim {self.directory}"):
            if communicator.rank == 0:
                self._rank0_directory = OpenDirectory(self._directory)
                sample = self._rank0_directory.sample()
        sample = communicator.broadcast_object(sample, label="directory of checkpoints")
        try:
            with RaisingOnAll(communicator, f"could not see {self.directory}"):
                # The file system may take a moment to show a folder.
                if not soon(lambda: os.path.isdir(sample), SECONDS_TO_BE_SEEN):
                    raise FileNotFoundError(
                        f"{sample}, which rank 0 has made, is not there: the directory of checkpoints must be on a "
                        "file system that all ranks see"
                    )
        finally:
            if self._rank0_directory is not None:
                self._rank0_directory.remove(sample)
        self._claimed = True

    def save(self, step: int | None = None, *, wait: bool = True) -> str:
        """Save all objects of the checkpoint, after waiting for a save that is still under way.

        Called by: every rank.
        Args:
            step: number of steps done, the same on all ranks; None is one more than the newest checkpoint's step.
            wait: whether to return only when the checkpoint is on disk. With False it returns when the state is copied
                in memory, and a thread writes the copy. The next `save` or `wait` raises the thread's errors. The
                program does not end before the thread.
        Returns: the checkpoint's path. With parameter servers the chief, or the first live worker, saves while the
            servers change nothing; other workers return at once, with the newest checkpoint's path.
        Raises: ValueError if optimizers, torch's schedulers or gradient scalers differ between ranks. DivergenceError
            if tensors of the checkpoint differ by more than rounding, and `mpistrat.may_differ` does not allow it. The
            checkpoint is written all the same, and is marked.
        """
        with cross_replica(self.checkpoint.strategy, "CheckpointManager.save"):
            began = time.monotonic()
            if not self._role.saves:
                return self.latest_checkpoint or self.directory
            self.wait()
            self.claim()
            self.checkpoint.check_alike("save")
            # Some objects compute their states by a collective.
            with self._communicator.raising_together(), self._role.unchanging():
                state = self.checkpoint.state_dict()
            drift = divergence_at_save(self.checkpoint.strategy, state)
            if drift is not None:
                state["classes"][DIFFERING] = drift.name
            checkpoint, files = self._prepare_save(step, state)
            del state
            work = checkpoint, files, began, self._communicator
            directory = self._rank0_directory
            if directory is None:
                self._saving = ReportingSave(*work)
            else:
                self._saving = CompletingSave(*work, directory, self._keep, self._role.completed)
            self._saving.start()
            if wait or drift is not None:
                self.wait()
                self._snapshots.forget()
            if drift is not None:
                drift.args = (
                    f"the checkpoint {checkpoint.path} has rank 0's values, and is marked as differing: {drift}",
                )
                raise drift
            return checkpoint.path

    def _prepare_save(
        self, step: int | None, state: Mapping[str, Any]
    ) -> tuple[UnfinishedCheckpoint, Files]:
        """Copy the state of this rank, and let rank 0 reserve the checkpoint. Called by: every rank.

        Training stands still meanwhile, so this function sends one message (`_agreed`) and does not use the disk.

        Returns: rank 0's reservation (the folder and names of the new checkpoint), and the files that this rank writes,
            by name.
        Raises: the errors of `_agreed`; rank 0 then gives its reservation up.
        """
        reserved: UnfinishedCheckpoint | None = None
        error: Exception | None = None
        files: Files = {}
        with contextlib.ExitStack() as undo:
            try:
                step = None if step is None else _checked_step(step)
                files = self._snapshots.files(state, self._communicator.rank)
                if self._rank0_directory is not None:
                    reserved = self._rank0_directory.reserve(step)
                    undo.callback(self._rank0_directory.give_up, reserved)
            except Exception as failed:
                error = failed
            agreed = self._agreed(step, reserved, error)
            undo.pop_all()  # keeps the reservation
        return agreed, files

    def _agreed(
        self, step: int | None, reserved: UnfinishedCheckpoint | None, error: Exception | None
    ) -> UnfinishedCheckpoint:
        """Return the checkpoint that rank 0 has reserved. Called by: every rank, with its own error or None.

        Raises: if a rank has an error: `error` on that rank, and RuntimeError on ranks without an error. ValueError on
            all ranks, if `step` differs between ranks.
        """
        entry = step, error is None, reserved
        entries = self._communicator.all_gather_object(entry, label="begin of a checkpoint")
        steps, are_well, checkpoints = zip(*entries, strict=True)
        different = {repr(each) for each in steps}
        if error is None and len(different) > 1:
            error = ValueError(f"the ranks save different steps: {[*steps]}, by rank")
        if error is not None or False in are_well:
            self._communicator.raise_any(error, "could not begin a checkpoint")
        return checkpoints[0]

    def wait(self) -> None:
        """Wait until the last save is on disk. It returns at once if no save is under way.

        Called by: every rank.
        Raises: if a rank could not write: that rank's own error on that rank, and RuntimeError on the other ranks. The
            unfinished checkpoint is deleted.
        """
        saving = self._saving
        if saving is None:
            return
        _, are_well, _, seconds = zip(*self._outcomes(saving), strict=True)
        self._seconds_to_save = max(self._seconds_to_save, *seconds)
        self._saving = None
        if False in are_well:
            self._claimed = False  # the directory may have changed or gone
            if self._rank0_directory is not None:
                self._rank0_directory.give_up(saving.checkpoint)
        failure = f"could not write its part of {saving.checkpoint.path}"
        self._communicator.raise_any(saving.error, failure)

    def _outcomes(self, saving: Saving) -> list[SavingProgress]:
        """Wait until all ranks have ended their work for the save.

        Meanwhile the ranks exchange their progress. If a rank has failed, the threads of the other ranks give up.

        Called by: `wait`, on every rank.
        Returns: the final `SavingProgress` of each rank, by rank.
        """
        pause = 0.001
        while True:
            progress = saving.progress()
            label = "whether a checkpoint is written"
            reports = self._communicator.all_gather_object(progress, label=label)
            are_finished, are_well, written, _ = zip(*reports, strict=True)
            if False not in are_finished:
                return reports
            if False in are_well:
                saving.abandoned.set()
            for rank, files in enumerate(written):
                if files:
                    saving.heard[rank] = files
            if progress.is_finished:
                time.sleep(pause)
            else:
                saving.finished.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Restore all objects from a checkpoint that any number of ranks has saved.

        All ranks use rank 0's `path`. Saved states of other objects are left alone; a notice names them if the program
        restores an optimizer, a scheduler, a gradient scaler or a distributed dataset. Another notice names both
        classes if an optimizer or a scheduler goes on from the state of another class. After an error, some objects may
        have been restored. With parameter servers the chief, or worker 0, reads the checkpoint, and other workers wait
        for it.

        Called by: every rank.
        Raises: ValueError for a damaged checkpoint, with the name of the file.
            Before anything is restored: KeyError if the checkpoint has no state of an object; ValueError if an
                optimizer has other parameters on another rank, if an optimizer or a scheduler cannot go on from the
                state of another class, or if a deterministic job has more or fewer replicas or threads.
            Later: ValueError for a dataset of another length in mid-epoch; ValueError on another number of ranks, for
                an input that each rank reads for itself (a dataset function, `local_batches=True`, or
                `AutoShardPolicy.OFF` on several ranks); ValueError on another number of replicas, for an ON_READ
                variable with aggregation NONE; and the errors of the objects.
        """
        with cross_replica(self.checkpoint.strategy, "CheckpointManager.restore"):
            self._restore(lambda: self._restore_from(path))

    def restore_or_initialize(self) -> str | None:
        """Restore the newest checkpoint that is not damaged. A warning names the files of newer, damaged ones.

        Called by: every rank.
        Returns: the checkpoint's path; None, without any change, if there is no checkpoint.
        Raises: ValueError if there are checkpoints, and all of them are damaged; the errors of `restore`.
        """
        with cross_replica(self.checkpoint.strategy, "CheckpointManager.restore_or_initialize"):
            return self._restore(self._restore_newest)

    def _restore(self, load: Callable[[], _Restored]) -> str | None:
        """Call `load`, or, on a worker that follows, load the states that another worker sends.

        Args:
            load: reads and loads a checkpoint. It returns the path and the states for followers.
        Returns: the checkpoint's path; None if there was no checkpoint.
        """
        if not self._role.restores:
            path, states = self._role.follow("restored")
            if states is not None:
                load_as_follower(self.checkpoint, states)
            return path
        with self._role.telling_failure("restored"):
            self.wait()
            path, states = load()
        self._role.tell_followers("restored", (path, states))
        if path is not None:
            self._role.completed(path, restored=True)
        return path

    def _restore_from(self, path: str | os.PathLike[str]) -> _Restored:
        communicator = self._communicator
        absolute = None
        with RaisingOnAll(communicator, f"could not restore {path!r:.60}"):
            if communicator.rank == 0:  # other ranks may be in other working directories
                absolute = os.path.abspath(path)
        chosen = communicator.broadcast_object(absolute, label="checkpoint to restore")
        with self._naming_rank(f"could not read {chosen}"):
            stored = _read(chosen, self.checkpoint, communicator)
        return chosen, self._load(stored)

    def _restore_newest(self) -> _Restored:
        paths, wrong = self._found()
        for path in paths:
            stored, errors = self._read_by_all(path)
            wrong += errors
            if stored is not None and not errors:
                if wrong:
                    text = f"going on from {path}, for {'; '.join(wrong)}"
                    warn_on_first_rank(self._communicator.rank, text, UserWarning, stacklevel=4)
                return path, self._load(stored)
        if wrong:
            raise ValueError(
                f"no checkpoint in {self.directory} can be read: {'; '.join(wrong)}. To begin anew, "
                "remove the checkpoints, or choose another directory"
            )
        return None, None

    def _found(self) -> tuple[list[str], list[str]]:
        """Return the paths of complete checkpoints, newest first, and an error text for each damaged one.

        Rank 0 looks, and all ranks get the same lists. Called by: every rank.
        """
        paths: list[str] = []
        wrong: list[str] = []
        with self._naming_rank("could not look for checkpoints"):
            if self._communicator.rank == 0:
                whole, damaged = self._directory.checkpoints()
                paths = [path for path, _ in reversed(whole)]
                wrong = [f"{text}, on rank 0" for text in damaged]
        label = "checkpoints that there are"
        return self._communicator.broadcast_object((paths, wrong), label=label)

    def _read_by_all(self, path: str) -> tuple[StoredCheckpoint | None, list[str]]:
        """Read the checkpoint at `path` on all ranks. Called by: every rank.

        Returns: the checkpoint, or None if this rank cannot read it; and the texts of all ranks' errors, equal on all
            ranks, empty if all can read it.
        """
        stored = None
        error = None
        try:
            stored = _read(path, self.checkpoint, self._communicator)
        except (ValueError, OSError) as failed:
            error = str(failed)
        label = "whether a checkpoint is readable"
        errors = self._communicator.all_gather_object(error, label=label)
        ranks: dict[str, list[int]] = {}  # ranks by the text of their error
        for rank, text in enumerate(errors):
            if text is not None:
                ranks.setdefault(text, []).append(rank)
        return stored, [f"{text}, {on_ranks(of_text)}" for text, of_text in ranks.items()]

    @contextlib.contextmanager
    def _naming_rank(self, what: str) -> Iterator[None]:
        """A context that raises an error of its block on all ranks. An error about a file also names the rank.

        Called by: every rank, because the end of the block is collective. Args: what: words such as "could not read".
        """
        with RaisingOnAll(self._communicator, what), on_rank(self._communicator.rank):
            yield

    def _load(self, stored: StoredCheckpoint) -> dict[str, Any] | None:
        """Load the states into the objects of this rank. Called by: every rank that reads checkpoint files.

        Returns: the states for workers that follow; None if the strategy has no followers.
        """
        states = None
        # Some objects load their states by a collective.
        with self._communicator.raising_together(), self._role.unchanging():
            state = self._assembled(stored)
            if self._role.has_followers:
                states = states_for_followers(self.checkpoint, state)
            self.checkpoint.load_state_dict(state)
            after_restore(self.checkpoint)
        # A rank that failed above does not come here. This call raises its error on the other ranks.
        self._communicator.raise_any(None, "could not restore")
        return states

    def _assembled(self, stored: StoredCheckpoint) -> dict[str, Mapping[Any, Any]]:
        """Return `stored.state` for `load_state_dict`, with sharded tensors split as the objects' tensors are now.

        Called by: every rank. Raises: on all ranks, if a rank cannot read a part of a sharded tensor that it needs.
        """
        common = stored.state["common"]
        communicator = self._communicator
        objects = self.checkpoint.stateful_objects()
        assembly = Assembly(objects, communicator.rank, communicator.size)
        known = {name: common[name] for name in objects if name in common}
        found = assembly.assembled(known, stored.parts, stored.manifest.ranks)
        if found:  # equal on all ranks, so all ranks call this or none
            # A rank that lacks parts has failed above. This call raises its error on the other ranks.
            communicator.raise_any(None, "could not assemble sharded tensors")
        return {**stored.state, "common": {**dict.fromkeys(common), **known, **found}}


def _read(path: str, checkpoint: Checkpoint, communicator: Communicator) -> StoredCheckpoint:
    stored = StoredCheckpoint(path, checkpoint.stateful_objects())
    stored.verify_ranks(communicator.rank, communicator.size)
    return stored


def _checked_step(step: Any) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number not in COUNT:
        raise ValueError(f"step must be a number of steps or None, got {step!r:.60}")
    return number


@functools.cache
def _report_unraised_at_exit() -> None:
    """Register `_report_unraised`, once for all managers: a handler of each manager would outlive the manager."""
    atexit.register(_report_unraised)


def _report_unraised() -> None:
    """Print the errors of saves that nobody waited for. Called at exit, when the threads have ended."""
    for manager in list(_managers):
        saving = manager._saving
        if saving is not None and saving.error is not None:
            tell(
                f"the checkpoint {saving.checkpoint.path} was not written: {type(saving.error).__name__}: "
                f"{saving.error}",
                "ERROR",
            )
