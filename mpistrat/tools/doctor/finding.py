"""The findings of the doctor: how they are made, shown to people, and written as JSON."""

from __future__ import annotations

import collections
import dataclasses
import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from mpistrat.errors import counted
from mpistrat.tools.doctor.facts import JobFacts, as_json

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
        has_advice = {bool(self.fix), bool(self.heading)}
        if has_advice != {self.level != OK}:
            raise ValueError(f"a finding has a fix and a heading exactly if it is not ok: {self}")


Findings = Iterator[Finding]
Level = partial[Finding]  # a check's function ok, warning or problem


def findings_of(check: str) -> tuple[Level, Level, Level]:
    """Return the functions ok(text), warning(text, fix, heading) and problem(text, fix, heading) for one check."""

    def at(level: str) -> Level:
        return partial(Finding, check, level)

    return at(OK), at(WARNING), at(PROBLEM)


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


SCHEMA = 1
WIDTH = 110
MOST_NAMED = 5  # nodes
_MARKS = {PROBLEM: "PROBLEM  ", WARNING: "warning  ", OK: "ok       "}


def as_text(findings: Sequence[Finding], nodes: int) -> str:
    """Return the findings as one text: problems first, a fix and a heading below each; last their numbers.

    Args: nodes: the number of nodes of the job. With one node, the nodes of a finding are not named.
    """
    lines = []
    for finding in sorted(findings, key=lambda finding: LEVELS.index(finding.level)):
        subject = _subject(finding, nodes)
        lines += _wrapped(_MARKS[finding.level], f"{subject}: {finding.text}")
        if finding.fix:
            see = f"(docs/troubleshooting.md: {finding.heading})"
            lines += _wrapped("    fix: ", f"{finding.fix} {see}")
    levels = collections.Counter(finding.level for finding in findings)
    if levels[PROBLEM] or levels[WARNING]:
        lines.append(
            f"{counted(levels[PROBLEM], 'problem')}, {counted(levels[WARNING], 'warning')}."
        )
    else:
        lines.append("Nothing to fix.")
    return "\n".join(lines)


def to_json(findings: Sequence[Finding], job: JobFacts) -> str:
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
    shown = ", ".join(named[:MOST_NAMED])
    if len(named) > MOST_NAMED:
        shown += f" and {len(named) - MOST_NAMED} more"
    return f"{finding.check} on {shown}"


def _wrapped(mark: str, text: str) -> list[str]:
    # Commands and paths stay whole.
    wrapper = textwrap.TextWrapper(WIDTH, mark, break_long_words=False, break_on_hyphens=False)
    wrapper.subsequent_indent = " " * len(mark)
    return wrapper.wrap(text)


def bytes_in_words(number: float) -> str:
    """Return a number of bytes in words: "64 MB". Units of 1000, three digits."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"
