"""One save on one rank: a thread of its own writes the files, from copies of the states.

Training uses MPI meanwhile, so no message tells rank 0 that all ranks have written. Each other rank writes a note (a
small file with the sizes of its files) into the folder, and rank 0 looks for the notes. Inside `CheckpointManager.wait`
ranks also tell each other by a message (`heard`), because some network file systems show a new file only after half a
minute.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from mpistrat.checkpoint import durable_files
from mpistrat.checkpoint.directory import OpenDirectory, UnfinishedCheckpoint
from mpistrat.checkpoint.failures import on_rank
from mpistrat.checkpoint.manifest import files_of, sealed, unsealed
from mpistrat.communicators import Communicator

SECONDS_WITHOUT_PROGRESS = 300.0
_SECONDS_BETWEEN_LOOKS = 0.005, 0.25

Written = Mapping[str, tuple[int, int]]
# The chunks of each file, by name. An iterable may make its chunks late, on the thread that writes.
Files = Mapping[str, Iterable["bytes | np.ndarray"]]


class SavingProgress(NamedTuple):
    """How far one rank's save is; ranks exchange it in `CheckpointManager.wait`. See the attributes of `Saving`."""

    is_finished: bool
    is_well: bool  # without an error
    written: Written | None
    seconds: float


class _Abandoned(Exception):
    """Ends the work of a thread, because another rank has failed or is lost."""

    pass


@dataclasses.dataclass(eq=False)
class Saving(abc.ABC):
    """The work of one rank for a save that is under way. `start` starts the thread that does it.

    Attributes:
        checkpoint: the checkpoint that is saved.
        files: the files that this rank writes, by name; empty once `finished` is set.
        began: time of the program's call of `save`, by `time.monotonic()`.
        communicator: communicator of the ranks that save; nothing is sent over it.
        written: (bytes, CRC-32) of this rank's files by name, once the files and the note are on disk; None before,
            after an error, and on rank 0.
        seconds: time from `began` until this rank's thread had done its work; 0.0 before, and after an error.
        error: the error of this rank, once `finished` is set; None without one.
        heard: `written` of other ranks, by rank. `CheckpointManager.wait` fills it from the ranks' messages.
        finished: an event; set when the thread has ended its work.
        abandoned: an event; set when another rank has failed, so that the thread need not wait for other ranks. The
            failed rank reports the error.
    """

    checkpoint: UnfinishedCheckpoint
    files: Files
    began: float
    communicator: Communicator
    written: Written | None = dataclasses.field(default=None, init=False)
    seconds: float = dataclasses.field(default=0.0, init=False)
    error: Exception | None = dataclasses.field(default=None, init=False)
    heard: dict[int, Written] = dataclasses.field(default_factory=dict, init=False)
    finished: threading.Event = dataclasses.field(default_factory=threading.Event, init=False)
    abandoned: threading.Event = dataclasses.field(default_factory=threading.Event, init=False)

    def start(self) -> None:
        # No daemon, so that the interpreter waits for the thread at exit, before MPI is finalized.
        threading.Thread(target=self._run, name="mpistrat checkpoint", daemon=False).start()

    def progress(self) -> SavingProgress:
        is_finished = self.finished.is_set()  # read first: nothing else changes after it is set
        return SavingProgress(is_finished, self.error is None, self.written, self.seconds)

    def _run(self) -> None:
        try:
            with contextlib.suppress(_Abandoned), on_rank(self.communicator.rank):
                self._ensure_folder()
                written = {
                    name: durable_files.write(os.path.join(self.checkpoint.folder, name), chunks)
                    for name, chunks in self.files.items()
                }
                self._finish(written)
                self.seconds = time.monotonic() - self.began
        except Exception as error:
            self.error = error
        finally:
            self.files = {}
            self.finished.set()

    @abc.abstractmethod
    def _ensure_folder(self) -> None:
        """Make the checkpoint's folder (rank 0), or wait until it exists (other ranks)."""

    @abc.abstractmethod
    def _finish(self, written: Written) -> None:
        """Report this rank's files to rank 0, or, on rank 0, complete the checkpoint. The files are on disk.

        Args: written: (bytes, CRC-32) of each file, by name.
        """

    def _note(self, rank: int) -> str:
        return os.path.join(self.checkpoint.folder, f"written-by-rank-{rank}")


class ReportingSave(Saving):
    """The work of each rank but 0: it writes its files, and reports them to rank 0 by a note in the folder."""

    def _ensure_folder(self) -> None:
        """Wait until rank 0 has made the folder. Other ranks do not make it, because rank 0 may have given it up.

        Raises: TimeoutError after `SECONDS_WITHOUT_PROGRESS`; _Abandoned if another rank has failed or is lost.
        """
        since = time.monotonic()
        while not os.path.isdir(self.checkpoint.folder):
            if self.abandoned.is_set() or self.communicator.contract.has_lost_a_rank():
                raise _Abandoned
            waited = time.monotonic() - since
            if waited > SECONDS_WITHOUT_PROGRESS:
                raise TimeoutError(
                    f"rank {self.communicator.rank} has waited {waited:.0f} s for the folder {self.checkpoint.folder}, "
                    "and does not see it. Rank 0 makes it: the directory must be on a file system that all ranks see"
                )
            self.abandoned.wait(_pause_after(waited))

    def _finish(self, written: Written) -> None:
        note = self._note(self.communicator.rank)
        durable_files.write(note + ".unfinished", [sealed(written)])
        os.rename(note + ".unfinished", note)
        self.written = written


@dataclasses.dataclass(eq=False)
class CompletingSave(Saving):
    """The work of rank 0: it makes the folder, writes its files, waits for all notes, and completes the checkpoint.

    Args:
        directory: the directory of the checkpoint.
        keep: number of checkpoints that stay in the directory.
        completed: function that is called with the path of the complete checkpoint.
    """

    directory: OpenDirectory
    keep: int
    completed: Callable[[str], None]

    def _ensure_folder(self) -> None:
        durable_files.make_folder(self.checkpoint.folder)

    def _finish(self, written: Written) -> None:
        files = dict(written)
        for rank in range(1, self.communicator.size):
            files.update(self._note_of(rank))
        # A job that was killed right after `complete` has left one checkpoint more than `keep`. It is deleted first, so
        # that the disk needs room for one further checkpoint, and not for two.
        self.directory.keep_newest(self.keep)
        self.directory.complete(self.checkpoint, self.communicator.size, files)
        self.completed(self.checkpoint.path)
        self.directory.keep_newest(self.keep)

    def _note_of(self, rank: int) -> Written:
        """Wait until `rank` has written its files, and remove its note.

        Returns: (bytes, CRC-32) of the rank's files, by name.
        Raises: TimeoutError if no file in the folder grows for `SECONDS_WITHOUT_PROGRESS`; _Abandoned if another rank
            has failed or is lost. A checkpoint without a lost rank's files is deleted.
        """
        note = self._note(rank)
        folder = self.checkpoint.folder
        progress: Any = None
        since = time.monotonic()
        while rank not in self.heard and not os.path.exists(note):
            if self.abandoned.is_set():
                raise _Abandoned
            if self.communicator.contract.has_lost_a_rank():  # the checkpoint cannot be completed
                self.directory.give_up(self.checkpoint)
                raise _Abandoned
            now = time.monotonic()
            seen = _sizes(folder)
            if seen != progress:
                progress = seen
                since = now
            if now - since > SECONDS_WITHOUT_PROGRESS:
                raise TimeoutError(
                    f"rank 0 has seen no progress in {folder} for {SECONDS_WITHOUT_PROGRESS:g} s: rank {rank} has "
                    "not written its files"
                )
            self.abandoned.wait(_pause_after(now - since))
        written: Written = {}
        # `heard` may have the rank before its note is visible here.
        with contextlib.suppress(FileNotFoundError):
            written = files_of(unsealed(durable_files.read_text(note), note))
            os.unlink(note)
        return self.heard.get(rank, written)


def _pause_after(waited: float) -> float:
    shortest, longest = _SECONDS_BETWEEN_LOOKS
    return min(max(waited / 16, shortest), longest)


def _sizes(folder: str) -> dict[str, int]:
    sizes = {}
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # the file was just renamed
            sizes[name] = os.stat(os.path.join(folder, name)).st_size
    return sizes
