"""What is said of other processes: how they died, and where they stand."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpistrat.liveness import deadlines, processes
from mpistrat.liveness.observer import report


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


def test_children() -> None:
    """Of a thread, too; and none of a process that does not exist."""
    program = (
        "import subprocess, sys, threading\n"
        "start = lambda: started.append(subprocess.Popen(['sleep', '60']))\n"
        "started = []; thread = threading.Thread(target=start); thread.start(); thread.join()\n"
        "print(flush=True); input(); started[0].kill(); started[0].wait(); print(flush=True); input()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], text=True, **pipes) as process:
        assert process.stdin
        assert process.stdout
        process.stdout.readline()
        assert processes.has_children(process.pid)
        print(file=process.stdin, flush=True)
        process.stdout.readline()
        assert not processes.has_children(process.pid)
        process.stdin.close()
    assert not processes.has_children(0)


def test_a_child_does_not_count_itself() -> None:
    """Init of a container has the observer among its children."""
    asks = "import os; from mpistrat.liveness import processes; print(processes.has_children(os.getppid()))"
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {asks!r}], check=True)"
    command = [sys.executable, "-c", starts]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_number_that_another_process_has_got() -> None:
    began = processes.began_at(os.getpid())
    assert processes.state_of(os.getpid(), began) in processes.RUNS
    assert processes.state_of(os.getpid(), began + 1) == ""
    assert began > processes.began_at(1)


def test_a_process_that_would_be_killed_is_not_asked_for_its_stack(tmp_path: Path) -> None:
    stacks = tmp_path / "stacks"
    stacks.touch()
    with subprocess.Popen(["sleep", "600"]) as child:
        try:
            until = time.monotonic() + 20
            while processes.command_of(child.pid) != "sleep 600":  # it may be in exec still
                assert time.monotonic() < until
                time.sleep(0.001)
            request = report.StackRequest(child.pid, signal.SIGRTMAX - 1, str(stacks))
            assert not request.sent
            assert request.frames() == []
            assert child.poll() is None
        finally:
            child.kill()


@pytest.mark.parametrize(
    ("status", "words"),
    [(None, "without a word"), (0, "exit code 0"), (3 << 8, "exit code 3"), (11, "SIGSEGV")],
)
def test_exits_in_words(status: int | None, words: str) -> None:
    assert words in processes.describe_exit(status)


BUSY_THREADS = """
import sys, threading, time
from mpistrat.liveness.observer.observation import speak_on_signal
from mpistrat.liveness.records.record import STACK_SIGNAL, RankRecord
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
    monkeypatch.setattr(deadlines, "OBSERVER_WAITS_FOR_STACK", 0.0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(report, "catches", lambda pid, number: True)
        patched.setattr(report.os, "kill", lambda pid, number: asked.append(number))
        request = report.StackRequest(os.getpid(), 10, str(stacks))
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
            deadlines, "OBSERVER_WAITS_FOR_STACK", 30.0
        )  # it may have no core for a while
        request = report.StackRequest(process.pid, number, str(stacks))
        here = BUSY_THREADS.splitlines().index("time.sleep(60)  # the main thread stands here") + 1
        assert request.frames() == [f"<string>:{here} in <module>"]
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()


NAMES_IN_TWO_CONTAINERS = """
import os
from types import SimpleNamespace
from mpistrat.liveness.processes import job_of

for namespace in (4026531836, 4026532001):
    os.stat = lambda _: SimpleNamespace(st_ino=namespace)
    print(job_of(os.getpid()))
"""


def test_jobs_of_containers_that_number_their_processes_alike(tmp_path: Path) -> None:
    """They may share /dev/shm; their launchers may have one number, and may have begun in the same moment."""
    program, launcher = tmp_path / "program.py", tmp_path / "mpiexec"
    program.write_text(NAMES_IN_TWO_CONTAINERS)
    launcher.write_text(f"#!/bin/sh\n{sys.executable} {program}\nexit $?\n")
    launcher.chmod(0o700)
    environ = {**os.environ, "PYTHONPATH": str(Path(processes.__file__).parents[2])}
    output = subprocess.run([launcher], env=environ, check=True, capture_output=True, text=True)
    names = output.stdout.split()
    assert len(names) == len(set(names)) == 2
