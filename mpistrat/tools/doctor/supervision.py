"""Starts the process that is a rank, and survives it: MPI may crash, hang, or end its process.

A launcher takes a rank's child for the rank: it has its environment and its open files, which is what shell scripts
between mpirun and a program rely on.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import IO, Any

from mpistrat.tools.doctor.children import file_in_memory, how_it_ended, last_words, written
from mpistrat.tools.doctor.facts import Failure, Job, Library, Rank, as_json, job_from_json

SECONDS_TO_IMPORT = 60.0
SECONDS_TO_END = 10.0  # MPI_Finalize


@dataclass(frozen=True)
class Outcome:
    """Of one rank's process.

    Attributes:
        job: what all ranks told, on rank 0.
        failure: None where MPI ran to the end.
        library: what was loaded, if it came that far.
        left: how the process ended after it had told everything; "" if as it should.
    """

    job: Job | None = None
    failure: Failure | None = None
    library: Library | None = None
    left: str = ""


def run_rank(rank: Rank) -> Outcome:
    """Called by: every rank; returns when its process has ended, or was late and is ended."""
    read, write = os.pipe()
    os.set_inheritable(write, True)
    with file_in_memory() as words, open(read, "rb", buffering=0) as told:
        process = subprocess.Popen(
            [sys.executable, "-m", "mpistrat.tools.doctor.rank_process", str(write)],
            stdin=subprocess.PIPE,
            stdout=words,
            stderr=words,
            close_fds=False,  # launchers hand ranks open files: PMI_FD
        )
        os.close(write)
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(as_json(rank)).encode())
            process.stdin.close()
        except BrokenPipeError:
            pass  # it has ended, and what it wrote tells why
        outcome = _listen(process, told, words)
        left = _end(process)
        if outcome.failure is None and left:
            return Outcome(outcome.job, None, outcome.library, left)
        return outcome


def _listen(process: subprocess.Popen[bytes], told: IO[bytes], words: IO[bytes]) -> Outcome:
    stage, until = "the start of Python", time.monotonic() + SECONDS_TO_IMPORT
    seconds = SECONDS_TO_IMPORT
    library: Library | None = None
    rest = b""
    while True:
        left = until - time.monotonic() if seconds else None  # 0: no limit
        if left is not None and not select.select([told], [], [], max(0, left))[0]:
            process.kill()
            failure = Failure(stage, "late", f"it did not end within {seconds:g} s", _said(words))
            return Outcome(None, failure, library)
        data = told.read(1 << 16)
        if not data:
            ended = how_it_ended(_wait(process)) or "it ended without a word"
            return Outcome(None, Failure(stage, "ended", ended, _said(words)), library)
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            what: dict[str, Any] = json.loads(line)
            if "stage" in what:
                stage, seconds = what["stage"], what["seconds"]
                until = time.monotonic() + seconds
            elif "library" in what:
                library = Library(**what["library"])
            elif "failure" in what:
                return Outcome(None, Failure(**what["failure"]), library)
            else:
                job = job_from_json(what["job"]) if "job" in what else None
                return Outcome(job, None, library)


def _wait(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
        return -signal.SIGKILL


def _end(process: subprocess.Popen[bytes]) -> str:
    """How the process ends by itself; "" for well."""
    try:
        return how_it_ended(process.wait(SECONDS_TO_END))
    except subprocess.TimeoutExpired:
        process.kill()
        return f"MPI_Finalize did not return within {SECONDS_TO_END:g} s"


def _said(words: IO[bytes]) -> str:
    return last_words(written(words))
