"""Draws one picture for each measurement. Needs matplotlib."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpistrat.communicators.costs.model import fitted
from mpistrat.machine.private_files import private
from mpistrat.tools.bench.rounds import Results, medians


@contextmanager
def _picture(path: str, title: str, columns: int) -> Iterator[Any]:
    import matplotlib as mpl

    mpl.use("Agg")  # no screen on a compute node
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(11, 4), layout="constrained")
    figure.suptitle(title)
    yield figure, *figure.subplots(1, columns, squeeze=False)[0]
    for part in figure.axes:
        part.grid(alpha=0.3)
    kind = os.path.splitext(path)[1].removeprefix(".") or "png"
    with open(path, "wb", opener=private) as file:
        figure.savefig(file, dpi=120, format=kind)
    pyplot.close(figure)


def _words(part: str) -> str:
    return part.removesuffix("_ms").replace("_", " ")


def over_sizes(
    what: str,
    nbytes: Sequence[int],
    times: Results,
    limit: Sequence[float],
    path: str,
    taken_on: str,
) -> None:
    """Draw the microseconds and the bandwidth of each contestant over the sizes into the file `path`.

    A dotted line is the fit to a contestant's times; the legend has its terms.

    Args:
        what: the operation, for the title.
        nbytes: the sizes in bytes.
        times: for each contestant, its microseconds at each size.
        limit: for each size, the microseconds for a copy of as many bytes on all ranks at once; a dashed line.
        taken_on: the ranks, the MPI and the machine, for the title.
    """
    with _picture(path, f"{what} · {taken_on}", 2) as (figure, left, right):
        sizes = np.asarray(nbytes, float)
        for name, us in times.items():
            fit = fitted(nbytes, (1e-6 * np.asarray(us)).tolist())
            (points,) = left.plot(sizes, us, "o", label=f"{name}: {fit}")
            colour = points.get_color()
            fitted_us = 1e6 * (fit.alpha + fit.beta * sizes)
            left.plot(sizes, fitted_us, ":", color=colour)
            right.plot(sizes, sizes / us / 1e3, ".-", color=colour)
        left.plot(sizes, limit, "k--", label="all ranks copy as much")
        right.plot(sizes, sizes / limit / 1e3, "k--")
        left.set(xscale="log", yscale="log", xlabel="bytes", ylabel="us")
        right.set(xscale="log", yscale="log", xlabel="bytes", ylabel="GB/s (algbw)")
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center")


def side_by_side(what: str, unit: str, samples: Results, path: str, taken_on: str) -> None:
    """Draw the median of each contestant as a bar, and its samples as points, into the file `path`.

    Args:
        what: the measurement, for the title.
        unit: the label of the axis: "ms per step".
        samples: by contestant, its times in this unit.
        taken_on: the ranks, the MPI and the machine, for the title.
    """
    with _picture(path, f"{what} · {taken_on}", 1) as (_, axes):
        times = medians(samples)
        axes.barh(list(times), list(times.values()), color="lightsteelblue")
        for place, values in enumerate(samples.values()):
            axes.plot(values, [place] * len(values), "k.", alpha=0.4)
        axes.invert_yaxis()
        axes.set(xlabel=unit)


def training(row: Mapping[str, Any], path: str, taken_on: str) -> None:
    """Draw the median time of a step's parts, and the slowest rank's time of every step, into the file `path`.

    Args: row: a row of `training.train`.   taken_on: the ranks, the MPI and the machine, for the title.
    """
    what = f"{row['model']}, global batch {row['batch_size']}, {row['input']} input"
    with _picture(path, f"{what} · {taken_on}", 2) as (_, left, right):
        below = 0.0
        for part in ("input_ms", "compute_ms", "exposed_communication_ms"):
            height = max(0.0, row[part])
            left.bar([row["model"]], [height], 0.4, bottom=below, label=_words(part))
            below += height
        left.set(ylabel="ms per step", xlim=(-0.5, 1.5))
        for part, ranks in row["samples"].items():
            slowest = [max(step) for step in zip(*ranks, strict=True)]
            right.plot(slowest, label=_words(part))
        right.set(xlabel="step", ylabel="ms, the slowest rank's")
        for axes in (left, right):
            axes.legend()
