"""The end of a Slurm job: as the environment, the user or a stand-in for `squeue` says."""

import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mpistrat.cluster_resolver.slurm.job import SlurmError, SlurmJob, slurm_job
from mpistrat.fault_tolerance import announced_end
from mpistrat.fault_tolerance.announced_end import TimeLimit


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts shell scripts of these names in front of all other programs."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def put(name: str, script: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)

    return put


def test_what_the_environment_says() -> None:
    assert slurm_job({}) is None
    assert slurm_job({"SLURM_JOB_ID": "17"}) == SlurmJob("17")
    known = slurm_job({"SLURM_JOB_ID": "17", "SLURM_JOB_END_TIME": "1795329466"})
    assert known == SlurmJob("17", 1795329466.0)
    for unknown in ("soon", "0", ""):
        said = slurm_job({"SLURM_JOB_ID": "17", "SLURM_JOB_END_TIME": unknown})
        assert said == SlurmJob("17"), unknown


@pytest.mark.parametrize(("job", "task"), [("18", "0"), ("17", "11")])
def test_a_task_of_a_job_array(command: Callable, tmp_path: Path, job: str, task: str) -> None:
    """The last task's own number is the array's, by which Slurm's commands mean all tasks."""
    array = {"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": task}
    of_task = slurm_job({"SLURM_JOB_ID": job, **array})
    assert of_task == SlurmJob(f"17_{task}")
    for name in ("scontrol", "squeue"):
        command(name, f'echo "$*" > "{tmp_path}/asked"; echo 1795329466')
    of_task.requeue(30)
    assert (tmp_path / "asked").read_text() == f"requeue 17_{task}\n"
    of_task.ask_end_time(30)
    assert (tmp_path / "asked").read_text() == f"-h -j 17_{task} -o %e\n"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("1795329466", 1795329466.0),
        ("1795329466\n1795329400", 1795329400.0),
        ("NONE", math.inf),
        ("UNLIMITED", math.inf),
        ("2026-11-22T06:37:46", time.mktime((2026, 11, 22, 6, 37, 46, 0, 0, -1))),
    ],
)
def test_what_squeue_says(command: Callable, answer: str, expected: float) -> None:
    command("squeue", f'[ "$*" = "-h -j 17 -o %e" ] && echo "{answer}"')
    assert SlurmJob("17").ask_end_time(30) == expected


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo slurm_load_jobs error: Invalid job id >&2; exit 1", "Invalid job id"),
        ("exit 3", "exit code 3"),
        ("echo tomorrow", "gave 'tomorrow'"),
        ("echo N/A", "gave 'N/A'"),  # no end is known now; that does not mean that there is none
        ("echo 0", "gave '0'"),
        ("", "does not know job 17"),
        ("exec sleep 30", "not answered within 0.2 s"),
    ],
)
def test_squeue_fails(command: Callable, script: str, message: str) -> None:
    command("squeue", script)
    with pytest.raises(SlurmError, match=message):
        SlurmJob("17").ask_end_time(0.2 if "sleep" in script else 30)


def test_squeue_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmError, match="squeue cannot be started: No such file"):
        SlurmJob("17").ask_end_time(30)
    with pytest.raises(SlurmError, match="scontrol cannot be started"):
        SlurmJob("17").requeue(30)


def test_requeue(command: Callable, tmp_path: Path) -> None:
    command("scontrol", f'echo "$*" > "{tmp_path}/asked"')
    SlurmJob("17").requeue(30)
    assert (tmp_path / "asked").read_text() == "requeue 17\n"


def test_what_the_user_says_counts(command: Callable) -> None:
    command("squeue", "echo 0")
    assert 50 < TimeLimit(SlurmJob("17", 5.0), time.time() + 60).seconds_left() <= 60
    assert TimeLimit(None).seconds_left() == math.inf


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_it_asks_again(command: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announced_end, "SHORTEST_PAUSE", 0.05)
    monkeypatch.setattr(announced_end, "LONGEST_PAUSE", 0.05)
    answer = tmp_path / "answer"
    answer.write_text("NONE")
    command("squeue", f'cat "{answer}"')
    limit = TimeLimit(SlurmJob("17", time.time() + 50))
    until(lambda: limit.seconds_left() == math.inf)
    answer.write_text(str(int(time.time()) + 1000))
    until(lambda: limit.seconds_left() < 1001)
    command("squeue", "exit 1")  # and what was known stays
    time.sleep(0.2)
    assert 900 < limit.seconds_left() < 1001


def test_an_error_of_any_kind_does_not_stop_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(announced_end, "SHORTEST_PAUSE", 0.01)
    monkeypatch.setattr(announced_end, "LONGEST_PAUSE", 0.01)
    answers = iter([UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"), MemoryError(), 7.0])

    class Job(SlurmJob):
        def ask_end_time(self, seconds: float) -> float:
            answer = next(answers, 7.0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    limit = TimeLimit(Job("17"))
    until(lambda: limit.seconds_left() < 0)
    assert "not known: UnicodeDecodeError: " in capsys.readouterr().err


def test_nothing_waits_for_squeue(command: Callable, tmp_path: Path) -> None:
    command("squeue", f'until [ -e "{tmp_path}/answer" ]; do sleep 0.1; done; echo NONE')
    began = time.monotonic()
    limit = TimeLimit(SlurmJob("17"))
    assert limit.seconds_left() == math.inf
    assert time.monotonic() - began < 15
    (tmp_path / "answer").touch()


def test_what_is_missing_is_told_once(
    command: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(announced_end, "SHORTEST_PAUSE", 0.01)
    monkeypatch.setattr(announced_end, "LONGEST_PAUSE", 0.01)
    command("squeue", "echo down >&2; exit 1")
    limit = TimeLimit(SlurmJob("17"))
    output = ""

    def is_told() -> bool:
        nonlocal output
        output += capsys.readouterr().err
        return "the time limit of job 17 is not known" in output

    until(is_told)
    time.sleep(0.3)
    assert (output + capsys.readouterr().err).count("not known") == 1
    assert limit.seconds_left() == math.inf


def test_its_thread_ends_with_it(command: Callable) -> None:
    command("squeue", "echo NONE")
    before = set(threading.enumerate())
    limit = TimeLimit(SlurmJob("17"))
    (thread,) = set(threading.enumerate()) - before
    del limit
    thread.join(30)
    assert not thread.is_alive()
