"""Tables for people, and the same with every sample as JSON (benchmarks/README.md)."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from mpistrat.machine.private_files import private
from mpistrat.tools.bench.rounds import all_ranks
from mpistrat.tools.bench.surroundings import surroundings

SCHEMA = 1
SAMPLES = "samples"  # the key of what is in the file only


def report(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    path: str | None = None,
    left_out: Mapping[str, str] = {},
) -> None:
    """Print `rows`, and write them to `path` with what they were taken on. Called by: every rank.

    Args:
        left_out: who does not take part, and why.
    """
    communicator = all_ranks()
    where = surroundings(communicator)
    if communicator.rank == 0:
        print(
            f"\n{title} · {where['ranks']} ranks · {where['mpi']} · {where['cpu']}, {where['usable_cores']} cores"
        )
        notes = [f"{name}: skipped, {reason}" for name, reason in left_out.items()]
        print("\n".join([*table(rows), *notes, *oversubscription(where)]), flush=True)
        if path:
            write_json(path, title, where, rows, left_out=left_out)


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines with a column for every key of any row, but for samples."""
    columns = [key for key in dict.fromkeys(key for row in rows for key in row) if key != SAMPLES]
    cells = [columns] + [[_cell(row.get(column, "-")) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    ]


def oversubscription(where: Mapping[str, Any]) -> list[str]:
    """The warning that such times need; nothing where there are cores for all ranks."""
    if not where["oversubscribed"]:
        return []
    return [
        f"OVERSUBSCRIBED: {where['ranks']} ranks on {where['usable_cores']} cores. These times say nothing of what "
        "as many cores would do"
    ]


def write_json(
    path: str,
    title: str,
    where: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    **more: Any,
) -> None:
    content = {
        "schema": SCHEMA,
        "title": title,
        "arguments": _without_files(sys.argv[1:]),
        "surroundings": where,
        **more,
        "rows": rows,
    }
    with open(path, "w", encoding="utf-8", opener=private) as file:
        json.dump(content, file, indent=1)
        file.write("\n")


def _without_files(arguments: Sequence[str]) -> list[str]:
    """Where results were written, and where a peer is installed, says nothing of them."""
    files = ("--json", "--plot", "--tensorflow")
    kept, skip = [], False
    for argument in arguments:
        if not skip and argument.split("=")[0] not in files:
            kept.append(argument)
        skip = argument in files
    return kept


def _cell(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
