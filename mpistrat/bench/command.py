"""The command line of `mpistrat-bench`."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.bench import plan
from mpistrat.bench.operations import OPERATIONS
from mpistrat.bench.surroundings import surroundings
from mpistrat.bench.sweep import Row, measure, sizes
from mpistrat.strategies import MultiWorkerMirroredStrategy

SCHEMA = 1
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
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


def number_of_bytes(text: str) -> int:
    """ "64M" is 64 · 2^20."""
    found = re.fullmatch(r"(\d+)([KMG]?)", text.upper().removesuffix("B"))
    if not found or not int(found[1]):
        raise argparse.ArgumentTypeError(
            f"expected bytes such as 4096, 64K, 16M or 1G, got {text!r}"
        )
    return int(found[1]) * _UNITS[found[2]]


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="mpistrat-bench",
        description="Measures collectives over the ranks of an MPI job: mpirun -n 8 mpistrat-bench all_reduce",
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in OPERATIONS:
        one = commands.add_parser(
            name,
            aliases=[name.replace("_", "")] if "_" in name else [],
            help=f"sweep {name} over sizes",
            description=f"{name} over a range of sizes, with nccl-tests' columns. GB are 1e9 bytes. The limit is the "
            "time in which all ranks at once copy as many bytes; results are checked.",
        )
        one.set_defaults(operation=name)
        one.add_argument("-b", "--minbytes", type=number_of_bytes, default="4K", metavar="BYTES")
        one.add_argument("-e", "--maxbytes", type=number_of_bytes, default="64M", metavar="BYTES")
        one.add_argument("-f", "--factor", type=int, default=4, help="between sizes (4)")
        one.add_argument("-d", "--dtype", default="float32", help="a number of NumPy's (float32)")
        one.add_argument("-n", "--iters", type=int, help="calls per size (what 2 s allow)")
        one.add_argument("--json", metavar="FILE", help="write everything, every call's time, too")
        one.add_argument("--plot", metavar="FILE.png", help="draw time and bandwidth (matplotlib)")
        if name == "all_reduce":
            one.add_argument(
                "--window",
                action="store_true",
                help="of buffers in shared memory, as gradients are",
            )
    planning = commands.add_parser(
        "plan",
        help="predict all_reduce on other numbers of nodes",
        description="The time of an all_reduce on N nodes, from a model that is fitted to what this run measures; "
        "where the run itself is such a one, beside the time that it takes.",
    )
    plan.add_arguments(planning, number_of_bytes)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 when results were wrong. Called by: every rank."""
    top = parser()
    given = top.parse_args(arguments)
    if given.command == "plan":
        if wrong_arguments := plan.mistake(given):
            top.error(wrong_arguments)
        return plan.main(given)
    if given.factor < 2:
        top.error(f"--factor must be at least 2, got {given.factor}")
    if given.iters is not None and given.iters < 1:
        top.error(f"--iters must be at least 1, got {given.iters}")
    if given.minbytes > given.maxbytes:
        top.error(f"--minbytes {given.minbytes} is more than --maxbytes {given.maxbytes}")
    try:
        dtype = np.dtype(given.dtype)
    except TypeError:
        dtype = None
    if dtype is None or dtype.kind not in "iufc":
        top.error(
            f"--dtype must be a number of NumPy's, such as float32 or int64, got {given.dtype!r}"
        )

    communicator = MultiWorkerMirroredStrategy().extended.communicator
    first = communicator.rank == 0
    rows: list[Row] = []
    if first:
        print(_heading(given.operation, communicator.size), flush=True)
    for nbytes in sizes(given.minbytes, given.maxbytes, given.factor):
        row = measure(
            OPERATIONS[given.operation],
            communicator,
            nbytes,
            dtype,
            in_window=getattr(given, "window", False),
            calls=given.iters,
        )
        rows.append(row)
        if first:
            print(_line(row), flush=True)
    where = surroundings(communicator)
    if first:
        print(_footer(rows, where), flush=True)
        if given.json:
            _write_json(given.json, given, rows, where)
        if given.plot:
            _plot(given.plot, given.operation, rows)
    wrong = sum(row.wrong for row in rows)
    communicator.barrier()
    return 1 if wrong else 0


def _heading(operation: str, ranks: int) -> str:
    names = "".join(name.rjust(width) for name, _, width in _COLUMNS)
    units = "".join(unit.rjust(width) for _, unit, width in _COLUMNS)
    return f"# {operation} over {ranks} ranks\n#\n#{names}\n#{units}"


def _line(row: Row) -> str:
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


def _footer(rows: Sequence[Row], where: dict[str, Any]) -> str:
    slowest = max(rows, key=lambda row: row.slowest_ratio)
    wrong = sum(row.wrong for row in rows)
    lines = [
        f"Out of bounds values: {wrong} {'FAILED' if wrong else 'OK'}",
        f"Average bus bandwidth: {sum(row.busbw for row in rows) / len(rows):.3f} GB/s",
        f"Slowest rank: {slowest.slowest_rank}, {slowest.slowest_ratio:.2f} times the median of the ranks at "
        f"{slowest.bytes} bytes",
        *where["ways"],
    ]
    if where["oversubscribed"]:
        lines.append(
            f"OVERSUBSCRIBED: {where['ranks']} ranks on {where['usable_cores']} cores. These times say nothing of what "
            "as many cores would do"
        )
    return "\n".join(f"# {line}" for line in lines)


def _write_json(
    path: str, given: argparse.Namespace, rows: Sequence[Row], where: dict[str, Any]
) -> None:
    content = {
        "schema": SCHEMA,
        "operation": given.operation,
        "in_window": getattr(given, "window", False),
        "arguments": sys.argv[1:],
        "surroundings": where,
        "rows": [row.as_dict() for row in rows],
    }
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")


def _plot(path: str, operation: str, rows: Sequence[Row]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    nbytes = [row.bytes for row in rows]
    figure, (times, bandwidths) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    times.plot(nbytes, [row.p50 for row in rows], "o-", label=f"{operation}, median")
    times.plot(nbytes, [row.limit for row in rows], "--", label="all ranks copy as much")
    times.set(xscale="log", yscale="log", xlabel="bytes", ylabel="us")
    bandwidths.plot(nbytes, [row.algbw for row in rows], "o-", label="algbw")
    limit = [row.bytes / row.limit / 1e3 for row in rows]
    bandwidths.plot(nbytes, limit, "--", label="all ranks copy as much")
    bandwidths.set(xscale="log", xlabel="bytes", ylabel="GB/s")
    for axes in (times, bandwidths):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
