"""Folders that killed jobs leave behind, and what MPI leaves in shared memory."""

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpistrat.liveness.records.job_folder import JobFolder, remove_leftovers
from support.job_records import other_process

INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO, <linux/proc_ns.h>


def test_a_folder_is_removed_once_nobody_lives(folders: Path) -> None:
    mine, new = JobFolder.create("mine-1234")
    assert new
    other, path, _ = other_process(folders, "other-1234")
    assert remove_leftovers() == []
    other.communicate("\n")
    assert remove_leftovers() == [path]
    assert not Path(path).exists()
    assert not Path(path + ".lock").exists()
    assert Path(mine.path).exists()


def test_processes_of_a_job_share_a_folder(folders: Path) -> None:
    first, new = JobFolder.create("job-1234")
    other, path, also_new = other_process(folders, "job-1234")
    assert (new, also_new) == (True, False)
    assert first.path == path
    assert not first.remove_if_last()
    other.communicate("\n")
    assert first.remove_if_last()
    assert list(folders.iterdir()) == []


def test_only_job_folders_are_removed(folders: Path, tmp_path: Path) -> None:
    """Not what else lies there with a lock file, nor anything behind a link."""
    project = tmp_path / "project"
    (project / "uv").mkdir(parents=True)
    (project / "uv.lock").touch()
    (project / "12345678-1.lock").touch()
    (project / "12345678-1").mkdir()
    folders.symlink_to(project)
    assert remove_leftovers() == []
    folder, _ = JobFolder.create("job-1234")
    assert Path(folder.path) == tmp_path / f"{folders.name}-job-1234"  # beside it
    assert folder.remove_if_last()
    folders.unlink()
    project.rename(folders)
    folders.chmod(0o777)
    assert remove_leftovers() == []
    folders.chmod(0o700)
    assert remove_leftovers() == [str(folders / "12345678-1")]
    assert (folders / "uv").exists()


@pytest.mark.parametrize("trap", ["link", "file", "of another user", "for all"])
def test_a_place_that_somebody_else_has_taken(folders: Path, tmp_path: Path, trap: str) -> None:
    """The job's processes agree on a name that nobody could foresee, and it is removed like any other."""
    if trap == "link":
        folders.symlink_to(tmp_path)
    elif trap == "file":
        folders.touch()
    else:
        folders.mkdir()
        folders.chmod(0o777 if trap == "for all" else 0o700)
        if trap == "of another user":
            if os.getuid():
                pytest.skip("needs root")
            os.chown(folders, 12345, 12345)
    before = sorted(tmp_path.iterdir())
    first, new = JobFolder.create("job-1234")
    other, path, also_new = other_process(folders, "job-1234")
    assert (first.path, new, also_new) == (path, True, False)
    assert Path(path).parent == tmp_path
    assert remove_leftovers() == []
    other.communicate("\n")
    assert first.remove_if_last()
    other, path, _ = other_process(folders, "job-5678")
    other.communicate("\n")
    assert remove_leftovers() == [path]
    assert sorted(tmp_path.iterdir()) == before


def test_what_others_put_beside_it_is_left_alone(folders: Path, tmp_path: Path) -> None:
    if os.getuid():
        pytest.skip("needs root")
    folders.touch()
    planted = tmp_path / f"{folders.name}-job-1234"
    planted.mkdir()
    lock = Path(f"{planted}.lock")
    lock.touch()
    os.chown(lock, 12345, 12345)
    assert remove_leftovers() == []
    with pytest.raises(OSError, match="another user's"):
        JobFolder.create("job-1234")
    lock.chmod(0o600)
    os.chown(lock, 0, 0)
    os.chown(planted, 12345, 12345)
    assert remove_leftovers() == []
    with pytest.raises(OSError, match="not a folder of this user's alone"):
        JobFolder.create("job-1234")
    assert planted.exists()


def test_noted_mappings_go_with_the_folder(folders: Path, tmp_path: Path) -> None:
    """Except those that are another job's by now: the same name, another inode."""
    folder, _ = JobFolder.create("job-1234")
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.touch()
    theirs.touch()
    mappings = Path(folder.path, "mappings-0")
    mappings.write_text(f"{ours.stat().st_ino} {ours}\n{theirs.stat().st_ino + 1} {theirs}\n")
    assert folder.remove_if_last()
    assert not ours.exists()
    assert theirs.exists()


@pytest.mark.parametrize(
    ("name", "of_mpi"),
    [("mpich_shm_test", True), ("sm_segment.test", True), ("my-dataset.npy", False)],
)
def test_only_mappings_of_mpi_are_noted(folders: Path, name: str, of_mpi: bool) -> None:
    """A program maps files of its own there, too."""
    folder, _ = JobFolder.create("job-1234")
    path = Path(f"/dev/shm/{name}.{os.getpid()}")
    path.write_bytes(b"x" * 4096)
    try:
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
            folder.remember_mappings(0)
            mappings = Path(folder.path, "mappings-0").read_text().splitlines()
            assert (f"{path.stat().st_ino} {path}" in mappings) == of_mpi
    finally:
        path.unlink()


@pytest.mark.parametrize(
    ("name", "age", "mapped", "stays"),
    [
        ("mpich_shm_test", 3600, False, False),
        ("sm_segment.test", 3600, False, False),
        ("mpich_shm_test", 3600, True, True),
        ("mpich_shm_test", 1, False, True),
        ("my-dataset.npy", 3600, False, True),
    ],
)
def test_what_mpi_left_and_nobody_maps_is_removed(
    name: str, age: float, mapped: bool, stays: bool
) -> None:
    if os.stat("/proc/self/ns/pid").st_ino != INITIAL_PID_NAMESPACE:
        pytest.skip("needs the initial PID namespace, where no process is hidden")
    path = Path(f"/dev/shm/{name}.{os.getpid()}")
    path.write_bytes(b"x" * 4096)
    os.utime(path, (time.time() - age,) * 2)
    program = "import mmap, sys; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0); print(); input()"
    other = subprocess.Popen(
        [sys.executable, "-uc", program if mapped else "print(); input()", str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert other.stdout is not None
        other.stdout.readline()
        remove_leftovers()
        assert path.exists() == stays
    finally:
        other.communicate(b"\n")
        path.unlink(missing_ok=True)
