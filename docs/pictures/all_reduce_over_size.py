"""Draw the recorded times of sums over their sizes, with the two lines that mpistrat fits to such times."""

import json

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from style import BLUE, GREEN, GREY, HERE, ORANGE, figure, save

from mpistrat.communicators.costs.model import Cost, fitted_in_two

RESULT = HERE.parents[1] / "benchmarks" / "results" / "mpich-2-ranks-sweep.json"


def draw() -> Figure:
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    found = result["surroundings"]
    rows = result["rows"]
    sizes = [row["bytes"] for row in rows]
    times = [row["p50"] for row in rows]
    mpi = found["mpi"].replace(" Version:", "")
    made = figure(4.4)
    axes = made.add_subplot(
        title=f"all_reduce of {found['ranks']} ranks on 1 node, through shared memory\n"
        f"{mpi}, {found['cpu']}, {found['started'][:10]}",
        xlabel="size of the buffer",
        ylabel="microseconds",
        xscale="log",
        yscale="log",
    )
    axes.plot(sizes, times, "o", color=GREEN, label="measured: the median of each size")
    cut, small, large = fitted_in_two(sizes, [time * 1e-6 for time in times])
    draw_line(axes, small, sizes[0], cut, BLUE)
    draw_line(axes, large, cut, sizes[-1], ORANGE)
    limits = [row["limit"] for row in rows]
    axes.plot(sizes, limits, ":", color=GREY, label="limit: both ranks copy as many bytes")
    axes.set_xticks(sizes, [named(size) for size in sizes])
    axes.set_yticks([1, 10, 100, 1000], ["1", "10", "100", "1000"])
    axes.minorticks_off()
    axes.grid(alpha=0.25, color=GREY)
    axes.legend()
    return made


def draw_line(axes: Axes, line: Cost, first: int, last: int, color: str) -> None:
    sizes = np.geomspace(first, last)
    microseconds = 1e6 * line.seconds(sizes)
    axes.plot(sizes, microseconds, color=color, label=str(line))


def named(size: int) -> str:
    """64 KB, 1 MB, … Args: size: a power of two, in bytes."""
    return f"{size >> 20} MB" if size >> 20 else f"{size >> 10} KB"


if __name__ == "__main__":
    save(draw(), __file__)
