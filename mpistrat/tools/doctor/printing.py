"""Show findings to people, or write them as JSON."""

from __future__ import annotations

import collections
import json
import textwrap
from collections.abc import Sequence

from mpistrat.tools.doctor.facts import Job, as_json
from mpistrat.tools.doctor.finding import LEVELS, OK, PROBLEM, WARNING, Finding
from mpistrat.tools.doctor.wording import count

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
