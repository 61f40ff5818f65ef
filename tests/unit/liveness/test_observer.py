"""The observer, with ranks that do nothing."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpistrat.liveness.records.job_folder import JobFolder, record_of
from mpistrat.liveness.records.record import RankRecord
from support.job_records import other_process

RANK = """
import os, sys
from mpistrat.liveness.records.job_folder import record_of
from mpistrat.liveness.records.record import EXPENDABLE, RankRecord
rank, size, expendable = map(int, sys.argv[2:])
record = RankRecord(record_of(sys.argv[1], rank), create=True)
record.start(rank, size, "node7", 60.0, 1)
record.words[EXPENDABLE] = expendable
print("ready", flush=True)
input()
"""
OBSERVER = """
import errno, os, sys
from mpistrat.liveness.observer import observer
observer.launcher_of = lambda pid: os.getppid()  # whose stderr is used once the ranks are dead
if sys.argv[1] == "kernel without":
    def pidfd_open(pid):
        raise OSError(errno.ENOSYS, "Function not implemented")
    os.pidfd_open = pidfd_open
elif sys.argv[1] == "python without":
    del os.pidfd_open
observer.main(sys.argv[2])
"""


# Stands in for the launcher: starts the observer, which inherits nothing of it.
LAUNCHER = f"""
import subprocess, sys
nothing = subprocess.DEVNULL
observer = subprocess.Popen([sys.executable, "-c", {OBSERVER!r}, *sys.argv[1:]],
    stdin=nothing, stdout=nothing, stderr=nothing)
sys.exit(observer.wait())
"""


def observer_of(path: str, cwd: Path, how: str = "with") -> "subprocess.Popen[str]":
    """The observer of a job's folder, which speaks through the process that is returned."""
    command = [sys.executable, "-c", LAUNCHER, how, path]
    return subprocess.Popen(command, stderr=subprocess.PIPE, cwd=cwd, text=True)


def wait_until_seen(path: str, rank: int) -> None:
    record = RankRecord(record_of(path, rank))
    until = time.monotonic() + 30
    while not record.looked:
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("pidfds", ["with", "kernel without", "python without"])
def test_the_observer_reports_only_who_is_dead(folders: Path, tmp_path: Path, pidfds: str) -> None:
    """Red Hat 8 has no pidfds, and conda's Python does not know them."""
    folder, _ = JobFolder.create("job-1234")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    program = [sys.executable, "-c"]
    alone = [folder.path, "0", "1", "0"]
    rank = subprocess.Popen([*program, RANK, *alone], **pipes)  # type: ignore[call-overload]
    assert rank.stdout.readline() == "ready\n"
    observer = observer_of(folder.path, tmp_path, pidfds)
    wait_until_seen(folder.path, 0)
    time.sleep(1.5)
    assert rank.poll() is None
    assert observer.poll() is None
    rank.kill()
    _, said = observer.communicate(timeout=50)
    rank.communicate()
    # Nobody has reaped it: it is still a zombie, whose exit status can be read.
    assert f"mpistrat: rank 0 of 1 (node7, pid {rank.pid}) was killed by SIGKILL" in said
    assert len(list(tmp_path.glob("mpistrat-report-*.txt"))) == 1
    assert Path(folder.path).exists()  # this process holds it, as what a rank forked might


def test_the_observer_removes_the_folder(folders: Path, tmp_path: Path) -> None:
    other, path, _ = other_process(folders, "job-1234")
    dead = subprocess.Popen(
        [sys.executable, "-c", RANK, path, "0", "1", "0"], stdin=subprocess.PIPE
    )
    dead.communicate(b"\n")
    other.communicate("\n")
    observer_of(path, tmp_path).communicate(timeout=50)
    assert list(folders.iterdir()) == []


@pytest.mark.parametrize(
    ("size", "message"), [(4, "the others go on without it"), (2, "Ending the job")]
)
def test_a_node_that_loses_all_its_ranks(
    folders: Path, tmp_path: Path, size: int, message: str
) -> None:
    """In an elastic job it is let go, if there are ranks on other nodes."""
    other, path, _ = other_process(folders, "job-1234")
    program = [sys.executable, "-c"]
    ranks = [
        subprocess.Popen(
            [*program, RANK, path, str(number), str(size), "1"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for number in range(2)
    ]
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"ready\n"
    observer = observer_of(path, tmp_path)
    for number in range(2):
        wait_until_seen(path, number)
    other.communicate("\n")
    for rank in ranks:
        rank.kill()
    _, said = observer.communicate(timeout=50)
    for rank in ranks:
        rank.communicate()
    assert message in said
    assert said.count("; the others go on without it") == (2 if size == 4 else 0)
    assert ("Ending the job" in said) == (size == 2)
