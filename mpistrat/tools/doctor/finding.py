"""What the doctor says: findings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from mpistrat.tools.doctor.facts import grouped

OK, WARNING, PROBLEM = "ok", "warning", "problem"
LEVELS = (PROBLEM, WARNING, OK)  # as they are printed


@dataclass(frozen=True)
class Finding:
    """A true sentence or two, and what to do about it if something is wrong.

    Attributes:
        check: what was looked at: "MPI", "cores", ...
        level: OK, WARNING (it works, and could do better) or PROBLEM (something to fix).
        nodes: the nodes of which it is true; none: it is true of the job.
    Raises: ValueError for an unknown level, or a warning or problem without a fix, or a fix for what is OK.
    """

    check: str
    level: str
    text: str
    fix: str = ""
    nodes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"level={self.level!r}: expected one of {LEVELS}")
        if (self.level != OK) != bool(self.fix):
            raise ValueError(f"what is not ok has a fix, and nothing else: {self}")


def findings_of(check: str) -> tuple[partial[Finding], partial[Finding], partial[Finding]]:
    """`ok(text)`, `warning(text, fix)` and `problem(text, fix)` of one check."""
    finding = partial(Finding, check)
    return partial(finding, OK), partial(finding, WARNING), partial(finding, PROBLEM)


def on_node(name: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """`findings` with the name of the node on which they were found."""
    return (dataclasses.replace(finding, nodes=(name,)) for finding in findings)


def said_once(findings: Iterable[Finding]) -> list[Finding]:
    """Findings that are the same on several nodes become one."""
    same = grouped((dataclasses.replace(finding, nodes=()), finding.nodes) for finding in findings)
    return [dataclasses.replace(finding, nodes=sum(names, ())) for finding, names in same.items()]
