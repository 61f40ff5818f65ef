"""Draws one picture for each measurement. Needs matplotlib."""

from __future__ import annotations

import importlib.util
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from mpistrat.machine.private_files import private

_LIMIT = "all ranks copy as much"


def can_be_drawn() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


@contextmanager
def _picture(path: str, columns: int) -> Iterator[Any]:
    import matplotlib as mpl

    mpl.use("Agg")  # no screen on a compute node
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(11, 4), layout="constrained")
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
    nbytes: Sequence[int], times: Mapping[str, Sequence[float]], limit: Sequence[float], path: str
) -> None:
    """Draw the microseconds and the bandwidth of each contestant over the sizes into the file `path`.

    Args:
        nbytes: the sizes in bytes.
        times: for each contestant, its microseconds at each size.
        limit: for each size, the microseconds for a copy of as many bytes on all ranks at once; a dashed line.
    """
    with _picture(path, 2) as (figure, left, right):
        for name, us in {**times, _LIMIT: limit}.items():
            style = "k--" if name == _LIMIT else "o-"
            left.plot(nbytes, us, style, label=name)
            bandwidth = [size / time / 1e3 for size, time in zip(nbytes, us, strict=True)]
            right.plot(nbytes, bandwidth, style, label=name)
        left.set(xscale="log", yscale="log", xlabel="bytes", ylabel="us")
        right.set(xscale="log", yscale="log", xlabel="bytes", ylabel="GB/s (algbw)")
        figure.legend(*left.get_legend_handles_labels(), loc="outside right upper")


def side_by_side(title: str, unit: str, samples: Mapping[str, Sequence[float]], path: str) -> None:
    """Draw the median of each contestant as a bar, and its samples as points, into the file `path`.

    Args: unit: the label of the axis: "ms per step".   samples: by contestant, its times in this unit.
    """
    with _picture(path, 1) as (_, axes):
        medians = list(map(statistics.median, samples.values()))
        axes.barh(list(samples), medians, color="lightsteelblue")
        for place, values in enumerate(samples.values()):
            axes.plot(values, [place] * len(values), "k.", alpha=0.4)
        axes.invert_yaxis()
        axes.set(xlabel=unit, title=title)


def training(row: Mapping[str, Any], path: str) -> None:
    """Draw the median time of a step's parts, and the slowest rank's time of every step, into the file `path`.

    Args: row: a row of `training.train`.
    """
    with _picture(path, 2) as (figure, left, right):
        below = 0.0
        for part in ("input_ms", "compute_ms", "exposed_communication_ms"):
            height = max(0.0, row[part])
            left.bar([row["model"]], [height], 0.4, bottom=below, label=_words(part))
            below += height
        left.set(ylabel="ms per step", xlim=(-0.5, 1.5))
        for part, ranks in row["samples"].items():
            right.plot([max(step) for step in zip(*ranks, strict=True)], label=_words(part))
        right.set(xlabel="step", ylabel="ms, the slowest rank's")
        for axes in (left, right):
            axes.legend()
        figure.suptitle(f"{row['model']}, global batch {row['batch_size']}, {row['input']} input")
