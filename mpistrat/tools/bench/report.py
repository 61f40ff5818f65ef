"""What a measurement reports: a table for people, and the same as JSON with every sample (benchmarks/README.md)."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpistrat.machine.private_files import private

SCHEMA = 1
SAMPLES = "samples"  # the column that only the file has

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Report:
    """What one command has measured.

    Attributes:
        where: what it was measured on, as `surroundings` has it.
        rows: for the file.
        lines: for people.
        more: further keys of the file.
        draw: draws a picture of it into a file.
        wrong: whether a result was wrong, which makes the exit code 1.
    """

    title: str
    where: Row
    rows: Sequence[Row]
    lines: Sequence[str]
    more: Row = field(default_factory=dict)
    draw: Callable[[str], None] | None = None
    wrong: bool = False

    def publish(self, path: str | None = None, picture: str | None = None) -> None:
        """Print it, and write its files. Called by: one rank."""
        print("\n".join(self.lines), flush=True)
        if path:
            content = {
                "schema": SCHEMA,
                "title": self.title,
                "arguments": _arguments_but_files(),
                "surroundings": self.where,
                **self.more,
                "rows": self.rows,
            }
            with open(path, "w", encoding="utf-8", opener=private) as file:
                json.dump(content, file, indent=1)
                file.write("\n")
        if picture and self.draw:
            self.draw(picture)


def table_report(
    title: str,
    rows: Sequence[Row],
    where: Row,
    left_out: Mapping[str, str] = {},
    draw: Callable[[str], None] | None = None,
) -> Report:
    """`rows` as a table. `left_out`: the peers that take no part, and why."""
    taken_on = (
        f"{where['ranks']} ranks · {where['mpi']} · {where['cpu']}, {where['usable_cores']} cores · "
        f"{where['device']}"
    )
    notes = [f"{name}: skipped, {reason}" for name, reason in left_out.items()]
    notes += oversubscription(where)
    lines = [f"\n{title} · {taken_on}", *distance_in_words(where), *table(rows), *notes]
    wrong = any(row.get("wrong") for row in rows)
    return Report(title, where, rows, lines, {"left_out": left_out}, draw, wrong)


def table(rows: Sequence[Row]) -> list[str]:
    """Lines with a column for every key of any row, except samples."""
    columns = dict.fromkeys(itertools.chain.from_iterable(rows))
    columns.pop(SAMPLES, None)
    cells = [list(columns)] + [[_cell(row.get(column, "-")) for column in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [aligned(line, widths, "  ") for line in cells]


def aligned(cells: Iterable[str], widths: Iterable[int], between: str = "") -> str:
    return between.join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def distance_in_words(where: Row) -> list[str]:
    """How far apart the cores were; empty where that is not measured."""
    if not min(where.get("distance_us", [0])):
        return []
    words = "Two ranks handed each other 128 KB in {:.0f} us before, and in {:.0f} us after"
    return [words.format(*where["distance_us"])]


def oversubscription(where: Row) -> list[str]:
    """The warning for more ranks than cores; empty where there is a core for each rank."""
    if not where["oversubscribed"]:
        return []
    return [
        f"OVERSUBSCRIBED: {where['ranks']} ranks on {where['usable_cores']} cores. These times say nothing of what "
        "as many cores would do"
    ]


def _arguments_but_files() -> list[str]:
    """The command line without paths: they say nothing about the results, and results can be handed on."""
    files = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--json", "--plot", "--tensorflow"):
        files.add_argument(option)
    return files.parse_known_args()[1]


def _cell(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
