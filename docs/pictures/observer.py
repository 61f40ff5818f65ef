"""Draw how the observer finds a rank that does not come, with the times and words of a real report."""

import re
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from style import BLUE, GREEN, GREY, ORANGE, RED, arrow, box, drawing, recorded, save

from mpistrat.liveness.records.record import RankRecord

MIDDLES = (19, 38, 57)  # of the ranks' columns
OBSERVER = 84
SMALL = {"size": 8}


def draw() -> Figure:
    (job,) = recorded("stall")
    lines = job["lines"]
    begin = min(line["time"] for line in lines)
    sums = sorted({line["sum"] for line in lines})
    in_time = {line["rank"] for line in lines if line["sum"] == sums[-1]}
    (late,) = {0, 1, 2} - in_time

    figure, axes = drawing("The observer: a process on each node that watches the node's ranks", 76)
    for rank, middle in enumerate(MIDDLES):
        draw_column(axes, middle, f"rank {rank}", BLUE)
    draw_column(axes, OBSERVER, "observer", GREEN)
    for row, number in enumerate(sums):
        top = 9 + 7 * row
        came = [line for line in lines if line["sum"] == number]
        last = max(line["time"] for line in came)
        tell_time(axes, top + 3, last - begin)
        for line in came:
            left = MIDDLES[line["rank"]] - 8
            box(axes, (left, top, 16, 5.5), f"sum {number}", GREY, **SMALL)
    frame = next(line for line in job["report"] if line.endswith(" in load"))
    place, function = frame.rpartition("/")[2].split(" in ")
    sleeps = f"sleeps in {function},\n{place}"
    left = MIDDLES[late] - 8
    box(axes, (left, 23, 16, 18), sleeps, ORANGE, **SMALL)
    waits = f"waits for\nrank {late}"
    for rank, middle in enumerate(MIDDLES):
        if rank != late:
            box(axes, (middle - 8, 30, 16, 11), waits, ORANGE, **SMALL)
    draw_end(axes, job, begin)
    return figure


def draw_column(axes: Axes, middle: float, name: str, color: str) -> None:
    axes.plot([middle, middle], [7, 72], color=color, alpha=0.4, zorder=0)
    box(axes, (middle - 8, 1, 16, 6), name, color)


def tell_time(axes: Axes, top: float, seconds: float) -> None:
    axes.text(0, top, f"{seconds:.2f} s", va="center", **SMALL)


def draw_end(axes: Axes, job: dict[str, Any], begin: float) -> None:
    """Draw what the observer does, and how the job ends."""
    limits = re.search(r"waited ([\d.]+ s) .* allows (\d+ s)\): (rank \d+ .*)", job["report"][0])
    assert limits is not None
    waited, allowed, reason = limits.groups()
    left = OBSERVER - 15
    width = 31
    reads = "reads the records in /dev/shm:\nwhich collective each rank\nis in, and since when"
    box(axes, (left, 9, width, 13), reads, GREEN, **SMALL)
    says = f"“ranks have waited {waited}” ({allowed}\nare allowed): “{reason}”"
    says = says.replace("has not", "has\nnot")
    box(axes, (left, 31, width, 10), says, GREEN, **SMALL)
    tell_time(axes, 38, job["reported"] - begin)
    word = f"{RankRecord.__name__}.abort"
    assert "abort" in vars(RankRecord)
    box(axes, (left, 46, width, 9), f"sets {word}\nof each rank", RED, **SMALL)
    axes.plot([MIDDLES[0], left], [50.5, 50.5], color=RED)
    for middle in MIDDLES:
        arrow(axes, (middle, 50.5), (middle, 58), RED)
        box(axes, (middle - 8, 58, 16, 6), "ends", RED, **SMALL)
    box(axes, (11, 68, 54, 6), f"mpirun ends with exit code {job['exit code']}", GREY, **SMALL)
    tell_time(axes, 71, job["ended"] - begin)


if __name__ == "__main__":
    save(draw(), __file__)
