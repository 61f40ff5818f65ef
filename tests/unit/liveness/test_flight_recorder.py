"""Records that outlive their process, folders that killed jobs leave behind, and what is said of other processes."""

import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpistrat.communicators.contract.agreement import BoardAgreement
from mpistrat.errors import StallError, TopologyError
from mpistrat.liveness import job_folder, processes
from mpistrat.liveness.failure_detector import find_ranks, waits
from mpistrat.liveness.job_folder import JobFolder, remove_leftovers
from mpistrat.liveness.record import (
    ABORT,
    MAX_BOARDS,
    MAX_SITE,
    RAISE,
    RING,
    STALLED,
    WORD,
    RankRecord,
    text_of,
)
from mpistrat.liveness.waiting import wait_until
from mpistrat.liveness.watch import CommunicatorWatch
from mpistrat.settings import raises_on_stall, stall_seconds

INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO, <linux/proc_ns.h>


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Job folders are made in a folder of the test's own."""
    monkeypatch.setattr(job_folder, "SHARED_MEMORY", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"mpistrat-{os.getuid()}"


def new_record(path: str | None, rank: int = 0) -> RankRecord:
    record = RankRecord(path, create=path is not None)
    record.start(rank, 2, "node7", 60.0, 1)
    return record


def test_a_record_is_read_after_its_process_was_killed(tmp_path: Path) -> None:
    path = str(tmp_path / "rank-0")
    program = f"""
import os
from mpistrat.liveness.record import RankRecord, text_of
record = RankRecord({path!r}, create=True)
record.start(0, 2, "node7", 60.0, 1)
board = record.new_board(5, 2)
for call in range(1, 101):
    record.enter(board, call, *text_of(f"all_reduce({{call}})", "train.py:33 in step"))
    record.waited(board)
    record.leave(board) if call < 100 else os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
    record = RankRecord(path)
    assert record.host == "node7"
    entries = record.last()
    assert [entry.call for entry in entries] == [
        f"all_reduce({call})" for call in range(100, 100 - RING, -1)
    ]
    assert entries[0].site == "train.py:33 in step"
    assert entries[0].waited >= 0
    (board,) = record.boards()
    assert (board.calls, board.size, board.since > 0) == (100, 2, True)


def test_long_texts_keep_what_tells_most() -> None:
    text, call_bytes = text_of("c" * 1000, "a" * 1000 + "/train.py:33 in step")
    assert text[:call_bytes].decode() == "c" * call_bytes
    site = text[call_bytes:].decode()
    assert len(site) == MAX_SITE
    assert site.startswith("...")
    assert site.endswith("/train.py:33 in step")


def test_boards_are_limited() -> None:
    record = new_record(None)
    assert all(record.new_board(i, 2) is not None for i in range(MAX_BOARDS))
    assert record.new_board(0, 2) is None


def test_seconds_waited_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    record = new_record(None)
    board = record.new_board(0, 2)
    assert board is not None
    now = 1_000_000_000_000
    monkeypatch.setattr(time, "monotonic_ns", lambda: now)
    record.enter(board, 1, *text_of("barrier()", "x.py:1 in f"))
    now += 2_500_000_000
    record.waited(board)
    assert record.seconds_waited() == 2.5
    now += 59_000_000_000
    assert record.seconds_waited() == 2.5
    assert record.seconds_waited(last=10) == 0
    now += 2_000_000_000
    assert record.seconds_waited() == 0


OTHER_PROCESS = """
import os, sys
from mpistrat.liveness import job_folder
job_folder.SHARED_MEMORY = sys.argv[1]
folder, new = job_folder.JobFolder.create(sys.argv[2])
print(folder.path, "new" if new else "old", flush=True)
input()
os.kill(os.getpid(), 9)
"""


def other_process(folders: Path, name: str) -> tuple["subprocess.Popen[str]", str, bool]:
    """It holds the folder until it is given a line. Returns: it, the folder's path, and whether that is new."""
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER_PROCESS, str(folders.parent), name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    path, age = other.stdout.readline().split()
    return other, path, age == "new"


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
    with pytest.raises(PermissionError, match="not a folder of this user's alone"):
        JobFolder.create("job-1234")
    folders.unlink()
    project.rename(folders)
    folders.chmod(0o777)
    assert remove_leftovers() == []
    folders.chmod(0o700)
    assert remove_leftovers() == [str(folders / "12345678-1")]
    assert (folders / "uv").exists()


def test_noted_mappings_go_with_the_folder(folders: Path, tmp_path: Path) -> None:
    """Except those that are another job's by now: the same name, another inode."""
    folder, _ = JobFolder.create("job-1234")
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.touch()
    theirs.touch()
    noted = Path(folder.path, "mappings-0")
    noted.write_text(f"{ours.stat().st_ino} {ours}\n{theirs.stat().st_ino + 1} {theirs}\n")
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
            noted = Path(folder.path, "mappings-0").read_text().splitlines()
            assert (f"{path.stat().st_ino} {path}" in noted) == of_mpi
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


def test_who_is_missing(folders: Path) -> None:
    folder, _ = JobFolder.create("job-1234")
    records = [new_record(job_folder.record_of(folder.path, rank), rank) for rank in range(3)]
    for rank, calls in enumerate((3, 2, 3)):
        board = records[rank].new_board(7, 3)
        assert board is not None
        records[rank].enter(board, calls, *text_of("barrier()", "x.py:1 in f"))
        if rank == 1:
            records[rank].leave(board)
    (wait,) = waits(find_ranks(folder.path))
    assert wait.call == 3
    assert [rank.number for rank in wait.waiting] == [0, 2]
    assert [rank.number for rank in wait.missing] == [1]


def of_the_second(word: int) -> BoardAgreement:
    """Rank 1's agreement with rank 0, which has written `word`."""
    first, second = (new_record(None, rank) for rank in range(2))
    theirs, mine = first.new_board(7, 2), second.new_board(7, 2)
    assert theirs is not None
    assert mine is not None
    first.words[theirs + WORD] = word
    return BoardAgreement(CommunicatorWatch(second, mine, [(first.words, theirs)], False))


@pytest.mark.parametrize("calls", [1, 255, 256])
def test_a_board_compares(calls: int) -> None:
    agreement = of_the_second(12 << 8 | calls & 0xFF)
    assert agreement.agree(calls, 12)
    assert not agreement.agree(calls, 13)


def test_a_rank_that_is_one_call_ahead_has_agreed() -> None:
    assert of_the_second(99 << 8 | (256 & 0xFF)).agree(255, 12)


def test_waiting_ends_with_a_reported_stall() -> None:
    watch = CommunicatorWatch(new_record(None))
    watch.record.words[ABORT] = RAISE
    with pytest.raises(StallError, match="rank 0 waited too long"):
        wait_until(lambda: False, watch)


def test_a_stall_of_another_communicator_is_not_raised() -> None:
    watch = CommunicatorWatch(new_record(None))
    watch.record.words[STALLED] = 7
    watch.record.words[ABORT] = RAISE
    ends = time.monotonic() + 0.1
    wait_until(lambda: time.monotonic() > ends, watch)


def test_waiting_has_a_limit_where_nobody_observes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpistrat.liveness.waiting.SECONDS_FOR_THE_OBSERVER", 0.1)
    record = RankRecord(None)
    record.start(1, 2, "node7", 0.2, 1)
    with pytest.raises(
        StallError, match=r"rank 1 waited (0\.[3-9]|[1-9]\d*\.\d) s .* no observer runs"
    ):
        wait_until(lambda: False, CommunicatorWatch(record, crowded=True))


def test_how_a_process_died() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pidfd = os.pidfd_open(child.pid)
    child.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 30
    while processes.state_of(child.pid) != "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert processes.describe_state(processes.state_of(child.pid)).startswith("stopped")
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    status = processes.exit_status(child.pid, pidfd)
    assert status == signal.SIGKILL
    assert "killed by SIGKILL" in processes.describe_exit(status)
    child.communicate()
    assert processes.state_of(child.pid) == ""
    os.close(pidfd)


@pytest.mark.parametrize(
    ("status", "words"),
    [(None, "without a word"), (0, "exit code 0"), (3 << 8, "exit code 3"), (11, "SIGSEGV")],
)
def test_exits_in_words(status: int | None, words: str) -> None:
    assert words in processes.describe_exit(status)


def test_limits_of_the_environment() -> None:
    assert stall_seconds({}) == 60
    assert stall_seconds({"MPISTRAT_STALL_SECONDS": "0"}) == 0
    assert not raises_on_stall({})
    assert raises_on_stall({"MPISTRAT_ON_STALL": "raise"})
    with pytest.raises(TopologyError, match="MPISTRAT_STALL_SECONDS='soon'"):
        stall_seconds({"MPISTRAT_STALL_SECONDS": "soon"})
    with pytest.raises(TopologyError, match="expected end or raise"):
        raises_on_stall({"MPISTRAT_ON_STALL": "ignore"})


# The observer, with a rank that does nothing

RANK = """
import os, sys
from mpistrat.liveness.job_folder import record_of
from mpistrat.liveness.record import EXPENDABLE, RankRecord
rank, size, expendable = map(int, sys.argv[2:])
record = RankRecord(record_of(sys.argv[1], rank), create=True)
record.start(rank, size, "node7", 60.0, 1)
record.words[EXPENDABLE] = expendable
print("ready", flush=True)
input()
"""
OBSERVER = """
import errno, os, sys
from mpistrat.liveness import observer
observer.launcher_of = lambda pid: None  # not the one that runs these tests
if sys.argv[1] == "kernel without":
    def pidfd_open(pid):
        raise OSError(errno.ENOSYS, "Function not implemented")
    os.pidfd_open = pidfd_open
elif sys.argv[1] == "python without":
    del os.pidfd_open
observer.main()
"""


@pytest.mark.parametrize("pidfds", ["with", "kernel without", "python without"])
def test_the_observer_reports_only_who_is_dead(folders: Path, tmp_path: Path, pidfds: str) -> None:
    """Red Hat 8 has no pidfds, and conda's Python does not know them."""
    folder, _ = JobFolder.create("job-1234")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    program = [sys.executable, "-c"]
    alone = [folder.path, "0", "1", "0"]
    rank = subprocess.Popen([*program, RANK, *alone], **pipes)  # type: ignore[call-overload]
    assert rank.stdout.readline() == "ready\n"
    observer = subprocess.Popen(
        [*program, OBSERVER, pidfds],
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        **pipes,  # type: ignore[call-overload]
    )
    observer.stdin.write(folder.path + "\n")
    observer.stdin.flush()
    assert observer.stdout.readline() == "watching\n"
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
    observer = subprocess.Popen(
        [sys.executable, "-c", OBSERVER, "with"], stdin=subprocess.PIPE, cwd=tmp_path
    )
    observer.communicate(f"{path}\n".encode(), timeout=50)
    assert list(folders.iterdir()) == []


@pytest.mark.parametrize(
    ("size", "told"), [(4, "the others go on without it"), (2, "Ending the job")]
)
def test_a_node_that_loses_all_its_ranks(
    folders: Path, tmp_path: Path, size: int, told: str
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
    observer = subprocess.Popen(
        [*program, OBSERVER, "with"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        text=True,
    )
    assert observer.stdin is not None
    assert observer.stdout is not None
    observer.stdin.write(f"{path}\n")
    observer.stdin.flush()
    assert observer.stdout.readline() == "watching\n"
    other.communicate("\n")
    for rank in ranks:
        rank.kill()
    _, said = observer.communicate(timeout=50)
    for rank in ranks:
        rank.communicate()
    assert told in said
    assert said.count("; the others go on without it") == (2 if size == 4 else 0)
    assert ("Ending the job" in said) == (size == 2)


BUSY_THREADS = """
import sys, threading, time
from mpistrat.liveness.observation import speak_on_signal
from mpistrat.liveness.record import STACK_SIGNAL, RankRecord
record = RankRecord(None)
speak_on_signal(record, sys.argv[1])
def deep(n):
    return n and deep(n - 1)
def busy():
    while True:
        deep(50)
        exec(compile("def g(x): return x\\nfor i in range(10): g(i)", "<made>", "exec"))
for _ in range(3):
    threading.Thread(target=busy, daemon=True).start()
print(record.words[STACK_SIGNAL], flush=True)
time.sleep(60)  # the main thread stands here
"""


def test_a_stack_that_came_in_time_is_read_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The observer waits for one rank after another, and may have had no core itself."""
    stacks = tmp_path / "stacks"
    stacks.touch()
    asked: list[int] = []
    monkeypatch.setattr(processes, "SECONDS_FOR_A_STACK", 0.0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(processes.os, "kill", lambda pid, number: asked.append(number))
        request = processes.StackRequest(os.getpid(), 10, str(stacks))
    assert asked == [10]
    stacks.write_text(
        'Current thread 0x1 (most recent call first):\n  File "train.py", line 7 in step\n'
    )
    time.sleep(0.01)
    assert request.frames() == ["train.py:7 in step"]


def test_asking_for_a_stack_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other threads go on while the frames are read: reading theirs, too, crashes within a hundred requests."""
    stacks = tmp_path / "stacks"
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY_THREADS, str(stacks)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        number = int(process.stdout.readline())
        for _ in range(400):
            os.kill(process.pid, number)
            time.sleep(0.002)
        time.sleep(0.5)  # for the last of its answers
        monkeypatch.setattr(
            processes, "SECONDS_FOR_A_STACK", 30.0
        )  # it may have no core for a while
        request = processes.StackRequest(process.pid, number, str(stacks))
        here = BUSY_THREADS.splitlines().index("time.sleep(60)  # the main thread stands here") + 1
        assert request.frames() == [f"<string>:{here} in <module>"]
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
