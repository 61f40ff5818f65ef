"""The arguments and the report of the programs beside this one."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from mpistrat.tools.bench.command_line import at_least
from mpistrat.tools.bench.device import HOST, Device
from mpistrat.tools.bench.report import Row, surroundings, table_report
from mpistrat.tools.bench.rounds import ROUNDS, all_ranks


def program(description: str | None, rounds: int = ROUNDS) -> argparse.ArgumentParser:
    """`--rounds N` and `--json PREFIX` for a program.

    `json(name)` of the parsed arguments is "PREFIXname.json", or None without `--json`.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--rounds",
        type=at_least(1),
        default=rounds,
        help="turns of each; the median counts (%(default)s)",
    )
    parser.add_argument(
        "--json",
        metavar="PREFIX",
        type=lambda prefix: (prefix + "{}.json").format,
        default=lambda name: None,
        help="how the names of files to write begin, e.g. benchmarks/results/mpich-2-ranks-",
    )
    return parser


def report(
    title: str,
    rows: Sequence[Row],
    path: str | None = None,
    left_out: Mapping[str, str] = {},
    device: Device = HOST,
) -> None:
    """Print `rows`, and write them to `path`, with what they were measured on. Called by: every rank."""
    communicator = all_ranks()
    where = surroundings(communicator, device)
    if communicator.rank == 0:
        table_report(title, rows, where, left_out).publish(path)
