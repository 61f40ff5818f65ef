"""The commands of `mpistrat-bench`. Each command imports its modules when it runs, so a sweep needs no torch."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import asdict

from mpistrat.machine.devices import check_device
from mpistrat.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from mpistrat.tools.bench import pictures, sweep
from mpistrat.tools.bench.command_line import parser
from mpistrat.tools.bench.device import HOST, Device
from mpistrat.tools.bench.operations import OPERATIONS
from mpistrat.tools.bench.report import Report, Row, surroundings, table_report
from mpistrat.tools.bench.rounds import (
    CannotTakePart,
    Results,
    UsageError,
    all_ranks,
    first_reason,
    medians,
)


def main(argv: Sequence[str] | None = None, prog: str = "mpistrat-bench") -> int:
    """Run the command that `argv` names, and report on rank 0. Called by: every rank, with the same `argv`.

    Args:
        argv: the arguments without the program's name; None: those of this process.
        prog: the program's name, for its messages: "mpistrat bench".
    Returns: the exit code: 0; 1 if a result was wrong; 2 for a UsageError; rank 0 prints it to stderr.
    Raises: SystemExit, with code 2, for arguments that the parser refuses.
    """
    top = parser(prog)
    arguments = top.parse_args(argv)
    if hasattr(arguments, "minbytes") and arguments.minbytes > arguments.maxbytes:
        top.error(f"--minbytes {arguments.minbytes} is more than --maxbytes {arguments.maxbytes}")
    picture = getattr(arguments, "plot", None)
    try:
        matplotlib = importlib.util.find_spec("matplotlib")
        if picture and not all_ranks().broadcast_object(matplotlib is not None):
            raise UsageError("--plot needs matplotlib: pip install matplotlib")
        report = _RUN[arguments.run](arguments)
        if all_ranks().rank == 0:
            report.publish(arguments.json, picture)
        code = int(report.wrong)
    except UsageError as error:
        if all_ranks().rank == 0:
            print(f"{prog}: error: {error}", file=sys.stderr, flush=True)
        code = 2
    all_ranks().barrier()
    return code


def device_named(wanted: str) -> Device:
    """Choose this rank's device for the whole run, by the option `--device`. Called by: every rank.

    An accelerator also becomes torch's current device.
    Args:
        wanted: "cpu"; "cuda" or another kind: one of the node's accelerators of this kind, shared out among the ranks;
            "cuda:1": this device on every rank; "auto": one of the node's accelerators, or the host if there are none.
    Raises: UsageError on all ranks, if a rank lacks the device or the ranks have devices of several kinds.
    """
    if wanted == HOST.kind:
        return HOST
    with contextlib.suppress(ImportError):  # without torch, no accelerator is used
        import torch  # noqa: F401
    mistake = ""
    devices = None
    try:
        if wanted != "auto":
            checked = check_device(wanted)
            if ":" in wanted:
                devices = [checked]
    except ValueError as error:
        mistake = f"rank {all_ranks().rank}: {error}"
    if mistake := first_reason(mistake):
        raise UsageError(f"--device {wanted}: {mistake}")
    strategy = MultiWorkerMirroredStrategy(devices=devices)
    device = Device(strategy.extended.worker_devices[0])
    kinds = all_ranks().all_gather_object(device.kind)
    if len(set(kinds)) > 1:
        raise UsageError(
            f"--device {wanted}: the ranks have devices of several kinds: {', '.join(kinds)}; --device cpu measures "
            "the host memory of all of them"
        )
    return device


def _sweep(arguments: argparse.Namespace) -> Report:
    """Measure one collective at each size; rank 0 prints each row as soon as it is measured. Called by: every rank.

    Raises: UsageError for --window with a device other than the host.
    """
    name = arguments.operation
    communicator = all_ranks()
    device = device_named(arguments.device)
    if arguments.window and not device.is_host:
        raise UsageError("--window is memory of the host, which ranks share: give --device cpu")
    rows: list[Row] = []

    def show(line: str) -> None:
        if communicator.rank == 0:
            print(line, flush=True)

    show(sweep.heading(name, communicator.size, device))
    for nbytes in sweep.sizes(arguments.minbytes, arguments.maxbytes, arguments.factor):
        row = sweep.measure(
            OPERATIONS[name],
            communicator,
            nbytes,
            arguments.dtype,
            in_window=arguments.window,
            calls=arguments.iters,
            device=device,
        )
        rows.append(row)
        show(sweep.line(row))
    where = surroundings(communicator, device)
    bytes_of_rows = [row["bytes"] for row in rows]
    times = {"median": [row["p50"] for row in rows]}
    limit = [row["limit"] for row in rows]

    def draw(path: str, taken_on: str) -> None:
        pictures.over_sizes(name, bytes_of_rows, times, limit, path, taken_on)

    return Report(
        "sweep",
        where,
        rows,
        sweep.footer(rows, where),
        {"operation": name, "in_window": arguments.window},
        draw,
        any(row["wrong"] for row in rows),
    )


def _train(arguments: argparse.Namespace) -> Report:
    from mpistrat.tools.bench import training

    row, where = training.train(arguments, device_named(arguments.device))

    def draw(path: str, taken_on: str) -> None:
        pictures.training(row, path, taken_on)

    return Report(
        "training",
        where,
        [row],
        training.lines(row, where),
        draw=draw,
        wrong=bool(training.wrong(row)),
    )


def _input(arguments: argparse.Namespace) -> Report:
    from mpistrat.tools.bench import input_pipelines

    samples: Results = {}
    if arguments.what == "overhead":
        rows = input_pipelines.overhead(arguments.rounds)
        for row in rows:
            for who, us in row["samples"].items():
                samples[f"{row['a step of']}, {who}"] = us
    else:
        rows = input_pipelines.throughput(arguments.examples, arguments.rounds)
        for row in rows:
            samples[f"{row['DataLoader']}, {row['workers per rank']} workers"] = row["samples"]
    title = f"input, {arguments.what}"

    def draw(path: str, taken_on: str) -> None:
        pictures.side_by_side(title, "us per epoch", samples, path, taken_on)

    return table_report(title, rows, surroundings(all_ranks()), draw=draw)


def _plan(arguments: argparse.Namespace) -> Report:
    from mpistrat.tools.bench import plan

    model, rows, where = plan.predictions(arguments)
    lines = plan.table(model, rows, where)
    return Report("plan", where, rows, lines, {"model": asdict(model)})


def _compare_train(arguments: argparse.Namespace) -> Report:
    from mpistrat.tools.bench import comparison
    from mpistrat.tools.bench.training import work_of

    device = device_named(arguments.device)
    work = work_of(arguments.model, arguments.batch_size, device.name)
    contestants, left_out = comparison.training_contestants(work, arguments.communication_options)
    rows = comparison.compare_training(contestants, arguments.rounds, device)
    title = f"training step of {arguments.model}, {work.examples} examples per rank"
    samples = {row["training step"]: row["samples"] for row in rows}

    def draw(path: str, taken_on: str) -> None:
        pictures.side_by_side(title, "ms per step", samples, path, taken_on)

    return table_report(title, rows, surroundings(all_ranks(), device), left_out, draw)


def _compare_all_reduce(arguments: argparse.Namespace) -> Report:
    from mpistrat.tools.bench import comparison

    device = device_named(arguments.device)
    nbytes = list(sweep.sizes(arguments.minbytes, arguments.maxbytes, arguments.factor))
    rows, left_out = comparison.compare_all_reduces(nbytes, arguments.rounds, device)
    times = [medians(row["samples"]) for row in rows]
    columns = {name: [row[name] for row in times] for name in times[0]}
    limit = columns.pop(comparison.COPY)

    def draw(path: str, taken_on: str) -> None:
        pictures.over_sizes("all_reduce", nbytes, columns, limit, path, taken_on)

    return table_report("all_reduce", rows, surroundings(all_ranks(), device), left_out, draw)


def _compare_torch(arguments: argparse.Namespace) -> Report:
    from mpistrat.tools.bench import torch_collectives

    device = device_named(arguments.device)
    try:
        rows = torch_collectives.compare_calls(
            arguments.calls, arguments.size, arguments.rounds, device
        )
    except CannotTakePart as reason:
        raise UsageError(f"compare torch --device {arguments.device}: {reason}") from None
    return table_report("calls of torch.distributed", rows, surroundings(all_ranks(), device))


_RUN = {
    "sweep": _sweep,
    "train": _train,
    "input": _input,
    "plan": _plan,
    "compare_train": _compare_train,
    "compare_all_reduce": _compare_all_reduce,
    "compare_torch": _compare_torch,
}
