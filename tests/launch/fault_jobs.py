"""Jobs in which a rank goes wrong: how long they may take to end, and what they have to leave behind."""

import platform
import re
import time
from collections.abc import Mapping
from pathlib import Path

from support.harness.mpi_launcher import Job, Launcher

LIMIT = 3.0  # MPISTRAT_STALL_SECONDS of these jobs
SECONDS_TO_END = 5.0  # after the limit
HOST_AND_PID = r" \(\S+, pid \d+\)"
# Linux's version: since 6.15 it tells how a process died.
KERNEL = tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2])
DIED = r"was killed by SIGKILL|died without a word"
STOPPED = r"is stopped \(state T"


def reports_in(folder: Path) -> tuple[str, ...]:
    found = sorted(folder.glob("mpistrat-report-*.txt"))
    return tuple(path.read_text(encoding="utf-8") for path in found)


def run_with_fault(
    launcher: Launcher,
    folder: Path,
    ranks: int,
    program: str,
    *words: str | Path,
    limit: float = LIMIT,
    waits: int = 1,
    env: Mapping[str, str] = {},
) -> Job:
    """Run the text of a program; when it goes wrong it writes the time to `folder / "fault"`.

    The job must fail, within SECONDS_TO_END after as many limits as its ranks wait, and leave no process behind.
    """
    file = folder / "program.py"
    file.write_text(program)
    settings = {"MPISTRAT_STALL_SECONDS": f"{limit:g}", **env}
    began = time.time()
    job = launcher.run_python(ranks, file, *words, seconds=60, env=settings, cwd=folder)
    assert job.returncode != 0, job.output
    seconds = began + job.seconds - float((folder / "fault").read_text())
    assert seconds < waits * limit + SECONDS_TO_END, job.output
    assert job.left_behind == (), job.output
    return job


def assert_says_who(job: Job, rank: int, ranks: int, signal: str) -> None:
    """That the rank was stopped, or killed, by this signal."""
    how = STOPPED if signal == "SIGSTOP" else DIED
    assert re.search(rf"rank {rank} of {ranks}{HOST_AND_PID} ({how})", job.output), job.output
