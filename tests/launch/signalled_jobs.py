"""Jobs that get a signal when all of them are at work."""

import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from support.harness.mpi_launcher import Job, Launcher, run_job


def signalled(
    launcher: Launcher,
    folder: Path,
    program: Sequence[str | Path],
    number: signal.Signals,
    to: str,
    *,
    ranks: int = 3,
    ready: int | None = None,
) -> tuple[Job, float]:
    """Start a program, send a signal once all are ready, and wait for the end.

    Args:
        program: its last argument will be `folder`, in which ranks that are ready make a file ready… each.
        to: the file in `folder` with the number of the process that gets it; "launcher" is there.
        ready: how many of them there are; None is one for each rank.
    Returns: the job, and the seconds from the signal to its end.
    """
    wanted = ranks if ready is None else ready

    def until_ready() -> None:
        deadline = time.monotonic() + 50
        while len(list(folder.glob("ready*"))) < wanted and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)  # they are in the collective by now

    command = launcher.command(ranks, [sys.executable, *map(str, program), str(folder)])
    environment = launcher.environment()
    job, seconds = signalled_command(command, environment, folder, number, until_ready, to=to)
    assert len(list(folder.glob("ready*"))) >= wanted, job.output
    return job, seconds


def signalled_command(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    number: int,
    until_ready: Callable[[], None],
    *,
    to: str = "launcher",
    group: bool = False,
    limit: float = 60.0,
) -> tuple[Job, float]:
    """Start a command, send a signal once `until_ready()` has returned, and wait for the end.

    Args:
        to: the file in `folder` with the number of the process that gets it; that of the command is "launcher".
        group: the signal is for its whole process group.
        limit: the command is killed after so many seconds.
    Returns: the job, and the seconds from the signal to its end.
    """
    started = f"echo $$ > {shlex.quote(str(folder / 'launcher'))}; exec {shlex.join(command)}"
    sent = []

    def send() -> None:
        until_ready()
        sent.append(time.monotonic())
        (os.killpg if group else os.kill)(int((folder / to).read_text()), number)

    sender = threading.Thread(target=send)
    sender.start()
    job = run_job(["sh", "-c", started], dict(environment), limit)
    sender.join()
    assert job.left_behind == ()
    return job, time.monotonic() - sent[0]
