"""Start the process that becomes the MPI rank, and still report if MPI crashes, hangs, or ends that process.

Launchers accept a child of the process that they started as the rank, because the child has the same environment and
open files. Shell scripts between mpirun and a program rely on that, too.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import IO

from mpistrat.tools.doctor.children import file_with, how_it_ended, last_words, written
from mpistrat.tools.doctor.facts import Job, JobFailure, Library, RankFacts, as_json, from_json

SECONDS_TO_IMPORT = 60.0
SECONDS_TO_END = 10.0  # the time for MPI_Finalize


@dataclass(frozen=True)
class Outcome:
    """How one rank's MPI process ended.

    Attributes:
        job: the facts of all ranks; None on other ranks than 0, and after a failure.
        failure: why the process did not write everything; None if it did.
        library: the MPI library that the process had loaded; None if it had not loaded one.
        left: how the process failed to end well after it had written everything: "killed by SIGSEGV"; "" if it ended
            well.
    """

    job: Job | None = None
    failure: JobFailure | None = None
    library: Library | None = None
    left: str = ""


def run_rank(rank: RankFacts) -> Outcome:
    """Run this rank's MPI process until it ends, or kill it if a step takes too long. Called by: every rank.

    Args: rank: the facts that are known without MPI; the process adds to them.
    Returns: the outcome. Faults of MPI are in it, and not raised.
    """
    read, write = os.pipe()
    os.set_inheritable(write, True)
    facts = json.dumps(as_json(rank)).encode()
    with file_with(facts) as stdin, file_with(b"") as words, open(read, "rb", buffering=0) as pipe:
        process = subprocess.Popen(
            [sys.executable, "-m", "mpistrat.tools.doctor.rank_process", str(write)],
            stdin=stdin,
            stdout=words,
            stderr=words,
            close_fds=False,  # launchers hand ranks open files: PMI_FD
        )
        os.close(write)
        outcome = _listen(process, pipe, words)
        left = _how_it_ends(process, f"MPI_Finalize did not return within {SECONDS_TO_END:g} s")
        return outcome if outcome.failure else dataclasses.replace(outcome, left=left)


def _listen(process: subprocess.Popen[bytes], pipe: IO[bytes], words: IO[bytes]) -> Outcome:
    """Read the process's lines of JSON from `pipe` until the last line, its end, or a step that takes too long.

    In the last case the process is killed.
    Args: words: the file with the process's stdout and stderr, for the text of a failure.
    """
    stage = "the start of Python"
    seconds = SECONDS_TO_IMPORT
    until = time.monotonic() + seconds
    library: Library | None = None
    rest = b""

    def failure(kind: str, text: str) -> JobFailure:
        return JobFailure(stage, kind, text, last_words(written(words)))

    while True:
        left = max(0, until - time.monotonic()) if seconds else None  # 0: no limit
        if not select.select([pipe], [], [], left)[0]:
            process.kill()
            text = f"it did not end within {seconds:g} s"
            return Outcome(None, failure("late", text), library)
        data = pipe.read(1 << 16)
        if not data:
            text = _how_it_ends(process, "killed by SIGKILL") or "it ended without a word"
            return Outcome(None, failure("ended", text), library)
        *lines, rest = (rest + data).split(b"\n")
        for message in map(json.loads, lines):
            if "stage" in message:
                stage = message["stage"]
                seconds = message["seconds"]
                until = time.monotonic() + seconds
            elif "library" in message:
                library = from_json(Library, message["library"])
            elif "failure" in message:
                return Outcome(None, from_json(JobFailure, message["failure"]), library)
            else:
                return Outcome(from_json(Job, message.get("job")), None, library)


def _how_it_ends(process: subprocess.Popen[bytes], late: str) -> str:
    """Wait at most 10 s until the process ends; then kill it.

    Returns: "" for exit code 0, else how it ended, such as "killed by SIGSEGV"; `late` if it had to be killed.
    """
    try:
        return how_it_ended(process.wait(SECONDS_TO_END))
    except subprocess.TimeoutExpired:
        process.kill()
        return late
