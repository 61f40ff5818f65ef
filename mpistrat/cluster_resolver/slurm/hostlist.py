"""Expands Slurm's short forms of host lists and of tasks per node."""

from __future__ import annotations

import re

MOST_HOSTS = 1 << 20  # a longer list is a typing error, because Slurm stops at 65,533 nodes

_PART = re.compile(r"(?=.)([^,\[\]\s]*)(?:\[([^\[\]\s]*)\])?")  # "n1", "n[13,41]", "n[001,007-015]"
# The text between commas that are outside brackets; no match in an empty text.
_BETWEEN_COMMAS = re.compile(r"(?:^(?!\Z)|,)((?:[^,\[]|\[[^\]]*\]?)*)")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")  # "7", "007-015"
_COUNT = re.compile(r"([0-9]{1,18})(?:\(x([0-9]{1,18})\))?")  # "2", "2(x3)"


def expand_hostlist(hostlist: str) -> list[str]:
    """Return the hosts of a list such as "n[9-11],a1": n9, n10, n11, a1. Slurm numbers its nodes in this order.

    A name may have brackets only at its end; Slurm writes no other brackets. Numbers are padded with zeros to the width
    of their range's first number: "n[08-10]" is n08, n09, n10. An empty text gives an empty list.
    Raises: ValueError for any other text, and for more than 2**20 hosts.
    """
    hosts: list[str] = []
    for part in _BETWEEN_COMMAS.findall(hostlist):
        match = _PART.fullmatch(part)
        if match is None:
            raise ValueError(
                f"host list {hostlist!r:.200}: {part!r:.80} is not a name, nor a name with one [range] at its end"
            )
        prefix, ranges = match.groups()
        if ranges is None:
            hosts.append(prefix)
        else:
            hosts += _numbered(prefix, ranges, hostlist)
        _check_length(len(hosts), hostlist)
    return hosts


def expand_tasks_per_node(tasks_per_node: str) -> list[int]:
    """Return the number of tasks of each node, in a list: "2(x3),1" is 2, 2, 2, 1.

    Raises: ValueError for a text that Slurm would not write, and for more than 2**20 nodes.
    """
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        match = _COUNT.fullmatch(part)
        if match is None:
            raise ValueError(
                f"tasks per node {tasks_per_node!r:.200}: {part!r:.80} is neither N nor N(xREPEAT)"
            )
        repeat = int(match[2] or 1)
        _check_length(len(counts) + repeat, tasks_per_node)
        counts += [int(match[1])] * repeat
    return counts


def _numbered(prefix: str, ranges: str, hostlist: str) -> list[str]:
    hosts: list[str] = []
    for item in ranges.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise ValueError(
                f"host list {hostlist!r:.200}: {item!r:.80} is neither a number nor a range a-b"
            )
        first = int(match[1])
        last = int(match[2] or match[1])
        width = len(match[1])
        if last < first:
            raise ValueError(f"host list {hostlist!r:.200}: the range {item!r} runs backwards")
        _check_length(len(hosts) + last - first + 1, hostlist)
        hosts += [f"{prefix}{number:0{width}d}" for number in range(first, last + 1)]
    return hosts


def _check_length(length: int, text: str) -> None:
    if length > MOST_HOSTS:
        raise ValueError(f"{text!r:.200} expands to more than {MOST_HOSTS} nodes")
