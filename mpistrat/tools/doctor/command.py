"""`mpistrat doctor`: gathers facts about a job, checks them, and prints findings. It also works if MPI is broken.

A child process becomes the MPI rank, so this process can still report if MPI crashes, hangs, or ends that process.
Launchers accept a child of the process that they started as the rank, because the child has the same environment and
open files. Shell scripts between mpirun and a program rely on that, too.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import IO

from mpistrat.tools.doctor import (
    cores,
    cuda_driver,
    gpus,
    links,
    memory,
    mpi_library,
    nodes,
    software,
)
from mpistrat.tools.doctor.children import file_with, how_it_ended, last_words, written
from mpistrat.tools.doctor.facts import JobFacts, JobFailure, Library, RankFacts, as_json, from_json
from mpistrat.tools.doctor.finding import PROBLEM, Finding, as_text, said_once, to_json

Check = Callable[[JobFacts], Iterable[Finding]]
SECONDS_FOR_RANK_0 = 20.0
_CHECKERS = (mpi_library, software, cores, memory, nodes, links, gpus)
CHECKS: tuple[Check, ...] = tuple(checker.check for checker in _CHECKERS)
SECONDS_TO_IMPORT = 60.0
SECONDS_TO_END = 10.0  # the time for MPI_Finalize


def run(in_json: bool) -> int:
    """Run the doctor on this rank, and print the findings on rank 0. Called by: every rank.

    If MPI did not start, rank 0, and each rank that does not know its number, prints the findings about itself. The
    other ranks print a line each, or one rank per node does.

    Args: in_json: whether to print JSON.
    Returns: the exit code: 0, or 1 if there is a problem.
    """
    here = look()
    outcome = run_rank(here)
    if outcome.job is not None:
        job = outcome.job
    elif outcome.failure is None:
        return 0  # rank 0 speaks for all
    elif here.launch.speaks:
        job = JobFacts([dataclasses.replace(here, library=outcome.library)], outcome.failure)
    else:
        return _speak_for_a_node(here, outcome.failure)
    findings = judge(job)
    if outcome.left:
        findings.append(
            mpi_library.warning(
                f"Rank 0 reported everything, but then it did not end well: {outcome.left}.",
                "update MPI, or try another of its transports (--mca pml ob1, UCX_TLS=tcp,self)",
                "It did not end well",
            )
        )
    nodes = len(job.nodes())
    text = to_json(findings, job) if in_json else as_text(findings, nodes)
    sys.stdout.write(text + "\n")  # one write, for launchers mix the lines of several writes
    sys.stdout.flush()
    return int(PROBLEM in {finding.level for finding in findings})


def look() -> RankFacts:
    """Return the facts that this process can find out without MPI. The first rank of a node also looks for GPUs."""
    launch = nodes.look()
    driver = cuda_driver.look()
    return RankFacts(
        rank=launch.rank or 0,
        host=launch.slurm.get("SLURMD_NODENAME") or socket.gethostname(),
        software=software.look(),
        launch=launch,
        cores=cores.look(),
        memory=memory.look(),
        driver=driver,
        gpus=gpus.look(driver) if launch.first_on_node else None,
    )


def judge(job: JobFacts) -> list[Finding]:
    """Return the findings of all checks about the job. Findings that are the same on several nodes are merged.

    If a check raises an error, a problem names the error.
    """
    findings: list[Finding] = []
    for check in CHECKS:
        try:
            findings.extend(check(job))
        except Exception as error:
            failure = Finding(
                check.__module__.rpartition(".")[2],
                PROBLEM,
                f"This check has failed with an error of its own: {type(error).__name__}: {error}.",
                "please report it, with the output of --json",
                "This check has failed with an error of its own",
            )
            findings.append(failure)
    return said_once(findings)


def _speak_for_a_node(here: RankFacts, failure: JobFailure) -> int:
    """Print one line on stderr, after 20 s, for a rank that is not rank 0. Rank 0 most likely failed, too, and says
    more.

    If the node's launcher or library is the fault, only the first rank of the node prints.
    Returns: the exit code: 0 for such a fault, else 1.
    """
    # All ranks of a node have one launcher and one library. Rank 0 may be on another node, with another fault.
    of_node = failure.kind in ("topology", "library")
    if not of_node or here.launch.first_on_node:
        time.sleep(SECONDS_FOR_RANK_0)  # launchers end this rank when rank 0 has spoken
        what = f"{failure.text} ({failure.words})" if failure.words else failure.text
        where = f"rank {here.rank} on {here.host}, {failure.stage}"
        print(f"mpistrat doctor: {where}: {what}", file=sys.stderr, flush=True)
    return int(not of_node)  # an exit code could end the job before rank 0 has spoken


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

    job: JobFacts | None = None
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
        for line in lines:
            message = json.loads(line)
            if "stage" in message:
                stage = message["stage"]
                seconds = message["seconds"]
                until = time.monotonic() + seconds
            elif "library" in message:
                library = from_json(Library, message["library"])
            elif "failure" in message:
                return Outcome(None, from_json(JobFailure, message["failure"]), library)
            else:
                return Outcome(from_json(JobFacts, message.get("job")), None, library)


def _how_it_ends(process: subprocess.Popen[bytes], late: str) -> str:
    """Wait at most 10 s until the process ends; then kill it.

    Returns: "" for exit code 0, else how it ended, such as "killed by SIGSEGV"; `late` if it had to be killed.
    """
    try:
        return how_it_ended(process.wait(SECONDS_TO_END))
    except subprocess.TimeoutExpired:
        process.kill()
        return late
