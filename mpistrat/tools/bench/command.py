"""The commands of `mpistrat-bench`. Each imports what it needs when it runs: a sweep needs no torch."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Sequence

from mpistrat.tools.bench import pictures
from mpistrat.tools.bench.arguments import parser
from mpistrat.tools.bench.operations import OPERATIONS
from mpistrat.tools.bench.report import report, write_json
from mpistrat.tools.bench.rounds import all_ranks
from mpistrat.tools.bench.surroundings import surroundings
from mpistrat.tools.bench.sweep import Row, measure, sizes
from mpistrat.tools.bench.sweep_table import footer, heading, line
from mpistrat.tools.bench.usage_error import UsageError


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 when results were wrong. Called by: every rank."""
    top = parser()
    given = top.parse_args(arguments)
    if hasattr(given, "minbytes") and given.minbytes > given.maxbytes:
        top.error(f"--minbytes {given.minbytes} is more than --maxbytes {given.maxbytes}")
    try:
        if getattr(given, "plot", None) and not all_ranks().broadcast_object(
            pictures.can_be_drawn()
        ):
            raise UsageError("--plot needs matplotlib: pip install 'mpistrat[bench]'")
        code = _RUN[given.run](given)
    except UsageError as error:
        if all_ranks().rank == 0:
            print(f"mpistrat-bench: error: {error}", file=sys.stderr, flush=True)
        code = 2
    all_ranks().barrier()
    return code


def _sweep(given: argparse.Namespace) -> int:
    communicator = all_ranks()
    first = communicator.rank == 0
    in_window = getattr(given, "window", False)
    rows: list[Row] = []
    if first:
        print(heading(given.operation, communicator.size), flush=True)
    for nbytes in sizes(given.minbytes, given.maxbytes, given.factor):
        row = measure(
            OPERATIONS[given.operation],
            communicator,
            nbytes,
            given.dtype,
            in_window=in_window,
            calls=given.iters,
        )
        rows.append(row)
        if first:
            print(line(row), flush=True)
    where = surroundings(communicator)
    if first:
        print(footer(rows, where), flush=True)
        if given.json:
            what = {"operation": given.operation, "in_window": in_window}
            write_json(given.json, "sweep", where, [row.as_dict() for row in rows], **what)
        if given.plot:
            pictures.over_sizes(
                given.plot,
                [row.bytes for row in rows],
                {f"{given.operation}, median": [row.p50 for row in rows]},
                [row.limit for row in rows],
            )
    return int(any(row.wrong for row in rows))


def _train(given: argparse.Namespace) -> int:
    from mpistrat.tools.bench import training

    row, where = training.train(
        given.model, given.batch_size, given.steps, given.input, given.communication_options
    )
    if all_ranks().rank == 0:
        print("\n".join(training.lines(row, where)), flush=True)
        if given.json:
            write_json(given.json, "training", where, [row])
        if given.plot:
            pictures.training(given.plot, row)
    return int(bool(training.wrong(row)))


def _input(given: argparse.Namespace) -> int:
    from mpistrat.tools.bench import input_pipelines

    if given.what == "overhead":
        rows = input_pipelines.overhead(given.rounds)
        samples = {
            f"{row['a step of']}, {who}": us for row in rows for who, us in row["samples"].items()
        }
    else:
        rows = input_pipelines.throughput(given.examples, given.rounds)
        samples = {
            f"{row['DataLoader']}, {row['workers per rank']} workers": row["samples"]
            for row in rows
        }
    report(f"input, {given.what}", rows, given.json)
    if given.plot and all_ranks().rank == 0:
        pictures.side_by_side(given.plot, f"input, {given.what}", "us per epoch", samples)
    return 0


def _plan(given: argparse.Namespace) -> int:
    from mpistrat.tools.bench import plan

    model, rows, where = plan.predictions(given)
    if all_ranks().rank == 0:
        print("\n".join(plan.table(model, rows, where)), flush=True)
        if given.json:
            described = [dataclasses.asdict(row) for row in rows]
            write_json(given.json, "plan", where, described, model=dataclasses.asdict(model))
    return 0


def _compare_train(given: argparse.Namespace) -> int:
    from mpistrat.tools.bench import comparison
    from mpistrat.tools.bench.training import work_of

    work = work_of(given.model, given.batch_size)
    contestants, left_out = comparison.training_contestants(work, given.communication_options)
    rows = comparison.compare_training(contestants, given.rounds)
    title = f"training step of {given.model}, {work.examples} examples per rank"
    report(title, rows, given.json, left_out=left_out)
    if given.plot and all_ranks().rank == 0:
        samples = {row["training step"]: row["samples"] for row in rows}
        pictures.side_by_side(given.plot, title, "ms per step", samples)
    return int(any(row["wrong"] for row in rows))


def _compare_all_reduce(given: argparse.Namespace) -> int:
    from mpistrat.tools.bench import comparison

    rows, left_out = [], dict[str, str]()
    for nbytes in sizes(given.minbytes, given.maxbytes, given.factor):
        contestants, left_out = comparison.all_reduce_contestants(nbytes)
        rows.append(comparison.compare_all_reduce(nbytes, contestants, given.rounds))
    report("all_reduce", rows, given.json, left_out=left_out)
    if given.plot and all_ranks().rank == 0:
        times = {
            name: [statistics.median(row["samples"][name]) for row in rows]
            for name in rows[0]["samples"]
        }
        limit = times.pop(comparison.COPY)
        pictures.over_sizes(given.plot, [row["bytes"] for row in rows], times, limit)
    return int(any(row["wrong"] for row in rows))


_RUN = {
    "sweep": _sweep,
    "train": _train,
    "input": _input,
    "plan": _plan,
    "compare_train": _compare_train,
    "compare_all_reduce": _compare_all_reduce,
}
