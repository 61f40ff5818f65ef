"""The report of a measurement: a table for people, and a JSON file with every sample (benchmarks/README.md)."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpistrat.communicators import Communicator
from mpistrat.machine.cpu_model import cpu_model
from mpistrat.machine.devices import num_accelerators, torch_accelerator
from mpistrat.machine.private_files import private
from mpistrat.tools.bench.device import HOST, Device
from mpistrat.tools.bench.rounds import distance_before, distance_now
from mpistrat.tools.doctor.software import version_of

SCHEMA = 1
SAMPLES = "samples"  # this column is in the file only

Draw = Callable[[str, str], None]
Row = dict[str, Any]  # a result or a machine, by the keys of the JSON file


@dataclass(frozen=True)
class Report:
    """The results of one command.

    Attributes:
        where: the machine and the software of the measurement, as `surroundings` returns them.
        rows: the results, for the JSON file.
        lines: the results as lines of text, for people.
        more: further keys of the JSON file.
        draw: draws a picture of the results. Its arguments: the picture's file, and `taken_on` for the title. None:
            there is no picture.
        wrong: whether a result was wrong; the exit code is then 1.
    """

    title: str
    where: Row
    rows: Sequence[Row]
    lines: Sequence[str]
    more: Row = field(default_factory=dict)
    draw: Draw | None = None
    wrong: bool = False

    def publish(self, path: str | None = None, picture: str | None = None) -> None:
        """Print the report, and write its files. Called by: rank 0.

        Args:
            path: the JSON file; None: no file.
            picture: the picture's file; None: no picture.
        """
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
            self.draw(picture, taken_on(self.where))


def table_report(
    title: str,
    rows: Sequence[Row],
    where: Row,
    left_out: Mapping[str, str] = {},
    draw: Draw | None = None,
) -> Report:
    """Return a report that shows `rows` as a table. It is `wrong` if the "wrong" of any row is true or over 0.

    Args: left_out: for each peer (a library to compare with) that takes no part, the reason.
    """
    notes = [f"{name}: skipped, {reason}" for name, reason in left_out.items()]
    notes += oversubscription(where)
    heading = f"\n{title} · {taken_on(where)}"
    lines = [heading, *distance_in_words(where), *table(rows), *notes]
    wrong = any(row.get("wrong") for row in rows)
    return Report(title, where, rows, lines, {"left_out": left_out}, draw, wrong)


def taken_on(where: Row) -> str:
    """Return the ranks, the MPI, the processor and the device of a measurement: "2 ranks · MPICH 5.0.2 · …"."""
    return (
        f"{where['ranks']} ranks · {where['mpi']} · {where['cpu']}, {where['usable_cores']} cores · "
        f"{where['device']}"
    )


def table(rows: Sequence[Row]) -> list[str]:
    """Return lines of text: the keys of all rows as a heading, then the values of each row below them.

    The samples have no column; a key that a row lacks is "-".
    """
    columns: Row = {}
    for row in rows:
        columns |= row
    columns.pop(SAMPLES, None)
    cells = [list(columns)]
    for row in rows:
        cells.append([_cell(row.get(column, "-")) for column in columns])
    by_column = zip(*cells, strict=True)
    widths = [max(len(cell) for cell in column) for column in by_column]
    return [aligned(line, widths, "  ") for line in cells]


def aligned(cells: Iterable[str], widths: Iterable[int], between: str = "") -> str:
    padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
    return between.join(padded)


def distance_in_words(where: Row) -> list[str]:
    """Return a line: the microseconds that two ranks took to hand each other 128 KB, before and after the run.

    An empty list if that was not measured.
    """
    if not min(where.get("distance_us", [0])):
        return []
    words = "Two ranks handed each other 128 KB in {:.0f} us before, and in {:.0f} us after"
    return [words.format(*where["distance_us"])]


def oversubscription(where: Row) -> list[str]:
    """Return a list with a warning that there are more ranks than cores; [] if there is a core for each rank."""
    if not where["oversubscribed"]:
        return []
    return [
        f"OVERSUBSCRIBED: {where['ranks']} ranks on {where['usable_cores']} cores. These times say nothing of what "
        "as many cores would do"
    ]


def _arguments_but_files() -> list[str]:
    """Return the arguments of the command line without --json, --plot and --tensorflow and their paths.

    So a user can publish the file without showing paths of this machine.
    """
    files = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--json", "--plot", "--tensorflow"):
        files.add_argument(option)
    return files.parse_known_args()[1]


def _cell(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def surroundings(communicator: Communicator, device: Device = HOST) -> Row:
    """Return the machine and the software of a measurement, as a dict for the report. Its texts are rank 0's.

    Collective; the same on all ranks. "distance_us" has two numbers, before and after the benchmark: the microseconds
    that two ranks of a node take to hand each other 128 KB, the slowest of all. "usable_cores" counts the cores of all
    hosts that any rank may use.

    Args: device: the device with the measured memory.
    """
    cores = sorted(os.sched_getaffinity(0))
    distances = distance_before(), distance_now()
    of_ranks = communicator.all_gather_object((socket.gethostname(), cores, distances))
    hosts = {host for host, _, _ in of_ranks}
    usable = {(host, cpu) for host, cpus, _ in of_ranks for cpu in cpus}
    all_distances = [between for _, _, between in of_ranks]
    mpi = sys.modules.get("mpi4py.MPI")
    here = {
        "tool": f"mpistrat {version_of('mpistrat') or '(not installed)'}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores_of_rank_0": len(cores),
        "ranks": communicator.size,
        "hosts": sorted(hosts),
        "usable_cores": len(usable),
        "oversubscribed": len(usable) < communicator.size,
        "distance_us": (1e6 * np.max(all_distances, axis=0)).tolist(),
        "mpi": _name_of(mpi.Get_library_version()) if mpi else "no MPI",
        "device": str(device),
        **_torch(),
        "ways": communicator.explain().split("\n"),
    }
    return communicator.broadcast_object(here)


def _name_of(library_version: str) -> str:
    """Return the first line of MPI's text about itself, up to a comma, with single spaces."""
    first_line = library_version.split("\n")[0]
    name = first_line.split(",")[0].strip("\0 ")
    return " ".join(name.split())


def _torch() -> Row:
    """Return torch's version, threads per rank and accelerators by report key; an empty dict if torch is not loaded."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    kind = torch_accelerator()
    count = num_accelerators() if kind else 0
    gpus = [str(Device(f"{kind}:{i}")) for i in range(count)]
    return {"torch": torch.__version__, "threads_per_rank": torch.get_num_threads(), "gpus": gpus}
