"""Jobs that get a signal when all of them are at work."""

import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Sequence
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
    command = launcher.command(ranks, [sys.executable, *map(str, program), str(folder)])
    started = f"echo $$ > {shlex.quote(str(folder / 'launcher'))}; exec {shlex.join(command)}"
    sent = []

    def send() -> None:
        deadline = time.monotonic() + 50
        while len(list(folder.glob("ready*"))) < wanted and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)  # they are in the collective by now
        sent.append(time.monotonic())
        os.kill(int((folder / to).read_text()), number)

    sender = threading.Thread(target=send)
    sender.start()
    job = run_job(["sh", "-c", started], launcher.environment(), 60.0)
    sender.join()
    assert job.left_behind == ()
    assert len(list(folder.glob("ready*"))) >= wanted, job.output
    return job, time.monotonic() - sent[0]
