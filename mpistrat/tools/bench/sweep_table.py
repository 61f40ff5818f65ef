"""What a sweep prints: nccl-tests' columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mpistrat.tools.bench.report import oversubscription
from mpistrat.tools.bench.sweep import Row

_COLUMNS = (
    ("size", "(B)", 12),
    ("count", "(elements)", 12),
    ("type", "", 9),
    ("redop", "", 6),
    ("time", "(us)", 11),
    ("p50", "(us)", 11),
    ("p99", "(us)", 11),
    ("algbw", "(GB/s)", 8),
    ("busbw", "(GB/s)", 8),
    ("#wrong", "", 7),
    ("% of", "limit", 7),
)


def heading(operation: str, ranks: int) -> str:
    names = "".join(name.rjust(width) for name, _, width in _COLUMNS)
    units = "".join(unit.rjust(width) for _, unit, width in _COLUMNS)
    return f"# {operation} over {ranks} ranks\n#\n#{names}\n#{units}"


def line(row: Row) -> str:
    cells = (
        str(row.bytes),
        str(row.count),
        row.type,
        row.redop,
        f"{row.time:.1f}",
        f"{row.p50:.1f}",
        f"{row.p99:.1f}",
        f"{row.algbw:.2f}",
        f"{row.busbw:.2f}",
        str(row.wrong),
        f"{row.percent_of_limit:.0f}",
    )
    return " " + "".join(
        cell.rjust(width) for cell, (_, _, width) in zip(cells, _COLUMNS, strict=True)
    )


def footer(rows: Sequence[Row], where: Mapping[str, Any]) -> str:
    slowest = max(rows, key=lambda row: row.slowest_ratio)
    wrong = sum(row.wrong for row in rows)
    lines = [
        f"Out of bounds values: {wrong} {'FAILED' if wrong else 'OK'}",
        f"Average bus bandwidth: {sum(row.busbw for row in rows) / len(rows):.3f} GB/s",
        f"Slowest rank: {slowest.slowest_rank}, {slowest.slowest_ratio:.2f} times the median of the ranks at "
        f"{slowest.bytes} bytes",
        *where["ways"],
        *oversubscription(where),
    ]
    return "\n".join(f"# {text}" for text in lines)
