"""A process killed at any system call of a save, or a machine that loses its power, leaves a whole checkpoint."""

import fcntl
import os
import shutil
import signal
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.checkpoint import Checkpoint, CheckpointManager
from mpistrat.checkpoint.directory import Directory, OpenDirectory

CALLS = ("open", "write", "fsync", "rename", "mkdir", "chmod", "fchmod", "unlink", "rmdir", "close")
REAL = {name: getattr(os, name) for name in CALLS}


class Disk:
    """What of the files under `top` a loss of power would take away: what was not waited for.

    Args:
        lies: waiting does not help.
    """

    def __init__(self, top: Path, lies: bool = False) -> None:
        self.top, self.lies = str(top), lies
        self.unsynced_files: set[str] = set()
        self.unsynced_names: set[str] = set()
        self.unsynced_renames: list[tuple[str, str]] = []

    def saw(self, name: str, path: str, new: str = "") -> None:
        if not path.startswith(self.top) or (name == "fsync" and self.lies):
            return
        if name == "write":
            self.unsynced_files.add(path)
        elif name == "fsync":
            self.unsynced_files.discard(path)
            self.unsynced_names = {n for n in self.unsynced_names if os.path.dirname(n) != path}
            self.unsynced_renames = [
                names for names in self.unsynced_renames if os.path.dirname(names[1]) != path
            ]
        elif name in ("mkdir", "open") and not os.path.exists(path):
            self.unsynced_names.add(path)
        elif name == "rename":
            self.unsynced_renames.append((path, new))
            for names in (self.unsynced_files, self.unsynced_names):
                for inner in [inner for inner in names if inner.startswith(path + "/")]:
                    names.remove(inner)
                    names.add(new + inner.removeprefix(path))

    def lose(self) -> None:
        vars(os).update(REAL)
        for path in filter(os.path.exists, self.unsynced_files):
            os.truncate(path, os.path.getsize(path) // 2)
        self._lose_names()
        for path, new in reversed(self.unsynced_renames):
            if os.path.exists(new):
                os.rename(new, path)
        self._lose_names()  # of what has its first name again

    def _lose_names(self) -> None:
        for path in self.unsynced_names:
            if os.path.isdir(path):
                shutil.rmtree(path)
            elif os.path.exists(path):
                os.unlink(path)


def crash_at(number: int, disk: Disk | None) -> None:
    """From now on the `number`-th system call is this process's last, and not done; half of it, if it writes."""
    done = 0

    def crashing(name: str, call: Callable) -> Callable:
        def wrapped(*args, **kwargs):
            nonlocal done
            if only_reads(name, *args):
                return call(*args, **kwargs)
            done += 1
            path = args[0]
            if isinstance(path, int):
                path = os.readlink(f"/proc/self/fd/{path}")
            if done == number:
                if name == "write":
                    call(args[0], args[1][: len(args[1]) // 2])
                if disk is not None:
                    if name == "write":
                        disk.saw(name, path)
                    disk.lose()
                os.kill(os.getpid(), signal.SIGKILL)
            if disk is not None:
                disk.saw(name, path, str(args[1]) if name == "rename" else "")
            return call(*args, **kwargs)

        return wrapped

    for name, call in REAL.items():
        setattr(os, name, crashing(name, call))


def only_reads(name: str, file, *args) -> bool:
    """Whether a call changes nothing on a disk, whatever happens at it."""
    if name == "close":
        return not fcntl.fcntl(file, fcntl.F_GETFL) & (os.O_WRONLY | os.O_RDWR)
    return name == "open" and not args[0] & (os.O_WRONLY | os.O_RDWR)


def manager_of(variable, directory: Path, keep: int) -> CheckpointManager:
    checkpoint = Checkpoint(variable=variable)
    del checkpoint.objects["random"]
    return CheckpointManager(checkpoint, directory, keep=keep)


def in_child(work: Callable[[], None]) -> int:
    """The status of a forked child that does `work`."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1]


@pytest.fixture(scope="module")
def two_saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the checkpoints of steps 1 and 2, full of these numbers."""
    directory = tmp_path_factory.mktemp("two") / "saved"
    for step in (1, 2):
        manager_of(ms.Variable(np.full(100, float(step))), directory, 2).save(step)
    return directory


def killed_at(number: int, directory: Path, keep: int, disk: Disk | None) -> tuple[bool, int]:
    """Whether a job was killed while it saved step 3, and which step is found afterwards, whole."""

    def save() -> None:
        manager = manager_of(ms.Variable(np.full(100, 3.0)), directory, keep)
        crash_at(number, disk)
        manager.save(3)

    status = in_child(save)
    assert status in (0, signal.SIGKILL)
    found = ms.Variable(np.zeros(100))
    manager = manager_of(found, directory, keep)
    path = manager.restore_or_initialize()
    assert path is not None
    step = int(path[-8:])
    assert found.numpy().tolist() == [step] * 100
    assert len(manager.checkpoints) >= keep
    return status != 0, step


@pytest.mark.long("A save is ended at each of its system calls, each time by a process of its own.")
@pytest.mark.parametrize(
    ("keep", "loses_power"), [(2, False), (1, True)], ids=["killed", "power lost"]
)
def test_at_every_system_call(
    two_saved: Path, tmp_path: Path, keep: int, loses_power: bool
) -> None:
    steps = []
    for number in range(1, 500):
        directory = tmp_path / str(number)
        shutil.copytree(two_saved, directory)
        disk = Disk(directory) if loses_power else None
        killed, step = killed_at(number, directory, keep, disk)
        steps.append(step)
        assert (
            in_child(partial(OpenDirectory, Directory(directory))) == 0
        )  # as the next job does when it saves
        assert {name for name in os.listdir(directory) if name[:5] != "step-"} == {".lock"}
        if not killed:
            break
    assert steps == sorted(steps)
    assert set(steps) == {2, 3}
    assert len(steps) > 20


@pytest.mark.long("A save is ended at each of its system calls, each time by a process of its own.")
def test_the_loss_of_power_is_noticed(two_saved: Path, tmp_path: Path) -> None:
    """Where files are not waited for, some crash leaves nothing to go on from, or something older."""
    steps = []
    for number in range(1, 60):
        directory = tmp_path / str(number)
        shutil.copytree(two_saved, directory)
        with warnings.catch_warnings(record=True):
            try:
                steps.append(killed_at(number, directory, 1, Disk(directory, lies=True))[1])
            except (AssertionError, ValueError):
                return
    assert steps != sorted(steps)


def test_a_new_directory_is_on_disk_with_its_first_checkpoint(tmp_path: Path) -> None:
    """And with the folders above it, once `save` has returned."""
    directory = tmp_path / "of this project" / "of this job" / "saved"

    def save() -> None:
        disk = Disk(tmp_path)
        crash_at(0, disk)
        manager_of(ms.Variable(1.0), directory, 1).save(1)
        disk.lose()

    assert in_child(save) == 0
    assert Directory(directory).checkpoints()[0]
