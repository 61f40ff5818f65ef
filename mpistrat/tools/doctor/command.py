"""`mpistrat doctor`: gathers facts about a job, checks them, and prints findings. It also works if MPI is broken."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import socket
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence

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
from mpistrat.tools.doctor.facts import Job, JobFailure, RankFacts, as_json
from mpistrat.tools.doctor.finding import LEVELS, OK, PROBLEM, WARNING, Finding, Findings, said_once
from mpistrat.tools.doctor.supervision import run_rank
from mpistrat.tools.doctor.wording import count

Check = Callable[[Job], Iterable[Finding]]
SECONDS_FOR_RANK_0 = 10.0
_CHECKERS = (mpi_library, software, cores, memory, nodes, links, gpus)
CHECKS: tuple[Check, ...] = tuple(checker.check for checker in _CHECKERS)
SCHEMA = 1
WIDTH = 110
MOST_NAMED = 5  # nodes
_MARKS = {PROBLEM: "PROBLEM  ", WARNING: "warning  ", OK: "ok       "}


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
        job = Job([dataclasses.replace(here, library=outcome.library)], outcome.failure)
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
    text = to_json(findings, job) if in_json else as_text(findings, len(job.nodes()))
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


def judge(job: Job) -> list[Finding]:
    """Return the findings of all checks about the job. Findings that are the same on several nodes are merged."""
    return said_once(itertools.chain(*(_guarded(check, job) for check in CHECKS)))


def _guarded(check: Check, job: Job) -> Findings:
    """Yield the findings of a check. If the check raises an error, yield a problem that names the error."""
    try:
        yield from check(job)
    except Exception as error:
        yield Finding(
            check.__module__.rpartition(".")[2],
            PROBLEM,
            f"This check has failed with an error of its own: {type(error).__name__}: {error}.",
            "please report it, with the output of --json",
            "This check has failed with an error of its own",
        )


def _speak_for_a_node(here: RankFacts, failure: JobFailure) -> int:
    """Print one line on stderr, after 10 s, for a rank that is not rank 0. Rank 0 most likely failed, too, and says
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


def as_text(findings: Sequence[Finding], nodes: int) -> str:
    """Return the findings as one text: problems first, a fix and a heading below each; last their numbers.

    Args: nodes: the number of nodes of the job. With one node, the nodes of a finding are not named.
    """
    lines = []
    for finding in sorted(findings, key=lambda finding: LEVELS.index(finding.level)):
        lines += _wrapped(_MARKS[finding.level], f"{_subject(finding, nodes)}: {finding.text}")
        if finding.fix:
            see = f"(docs/troubleshooting.md: {finding.heading})"
            lines += _wrapped("    fix: ", f"{finding.fix} {see}")
    levels = collections.Counter(finding.level for finding in findings)
    if levels[PROBLEM] or levels[WARNING]:
        lines.append(f"{count(levels[PROBLEM], 'problem')}, {count(levels[WARNING], 'warning')}.")
    else:
        lines.append("Nothing to fix.")
    return "\n".join(lines)


def to_json(findings: Sequence[Finding], job: Job) -> str:
    content = {
        "schema": SCHEMA,
        "findings": [as_json(finding) for finding in findings],
        "facts": as_json(job),
    }
    return json.dumps(content, indent=1)


def _subject(finding: Finding, nodes: int) -> str:
    named = finding.nodes
    if not named or nodes == 1:
        return finding.check
    if len(named) == nodes:
        return f"{finding.check} on all {nodes} nodes"
    more = f" and {len(named) - MOST_NAMED} more" * (len(named) > MOST_NAMED)
    return f"{finding.check} on {', '.join(named[:MOST_NAMED])}{more}"


def _wrapped(mark: str, text: str) -> list[str]:
    # Commands and paths stay whole.
    wrapper = textwrap.TextWrapper(WIDTH, mark, break_long_words=False, break_on_hyphens=False)
    wrapper.subsequent_indent = " " * len(mark)
    return wrapper.wrap(text)
