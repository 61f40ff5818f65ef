"""The findings of the doctor."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

OK = "ok"
WARNING = "warning"
PROBLEM = "problem"
LEVELS = (PROBLEM, WARNING, OK)  # in the order of printing


@dataclass(frozen=True)
class Finding:
    """One result of a check: a true sentence or two, and advice if something is wrong.

    Attributes:
        check: the subject of the check: "MPI", "cores", ...
        level: OK, WARNING (it works, and could do better) or PROBLEM (something to fix).
        fix: the advice; "" for level OK.
        heading: the heading of docs/troubleshooting.md that says more; "" for level OK.
        nodes: the names of the nodes with this finding; empty: it is about the whole job.
    Raises: ValueError for an unknown level, for a warning or problem without a fix or heading, and for one at level OK.
    """

    check: str
    level: str
    text: str
    fix: str = ""
    heading: str = ""
    nodes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"level={self.level!r}: expected one of {LEVELS}")
        if {bool(self.fix), bool(self.heading)} != {self.level != OK}:
            raise ValueError(f"a finding has a fix and a heading exactly if it is not ok: {self}")


Findings = Iterator[Finding]


def findings_of(check: str) -> tuple[partial[Finding], partial[Finding], partial[Finding]]:
    """Return the functions ok(text), warning(text, fix, heading) and problem(text, fix, heading) for one check."""
    finding = partial(Finding, check)
    return partial(finding, OK), partial(finding, WARNING), partial(finding, PROBLEM)


def on_node(name: str, findings: Iterable[Finding]) -> Findings:
    """Return the findings as findings about the node `name` alone."""
    return (dataclasses.replace(finding, nodes=(name,)) for finding in findings)


def said_once(findings: Iterable[Finding]) -> list[Finding]:
    """Merge findings that differ only in their nodes: one finding then has the nodes of all.

    Returns: the merged findings, in the order of their first occurrence.
    """
    nodes: dict[Finding, tuple[str, ...]] = {}
    for finding in findings:
        alone = dataclasses.replace(finding, nodes=())
        nodes[alone] = nodes.get(alone, ()) + finding.nodes
    return [dataclasses.replace(finding, nodes=names) for finding, names in nodes.items()]
