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
    lines, report = job["lines"], job["report"]
    begin = min(line["time"] for line in lines)
    sums = sorted({line["sum"] for line in lines})
    (late,) = {0, 1, 2} - {line["rank"] for line in lines if line["sum"] == sums[-1]}

    figure, axes = drawing("The observer: a process on each node that watches the node's ranks", 76)
    for rank, middle in enumerate(MIDDLES):
        draw_column(axes, middle, f"rank {rank}", BLUE)
    draw_column(axes, OBSERVER, "observer", GREEN)
    for row, number in enumerate(sums):
        came = [line for line in lines if line["sum"] == number]
        tell_time(axes, 12 + 7 * row, max(line["time"] for line in came) - begin)
        for line in came:
            place = (MIDDLES[line["rank"]] - 8, 9 + 7 * row, 16, 5.5)
            box(axes, place, f"sum {number}", GREY, **SMALL)
    place = next(line for line in report if line.endswith(" in load")).rpartition("/")[2]
    where = "sleeps in {1},\n{0}".format(*place.split(" in "))
    box(axes, (MIDDLES[late] - 8, 23, 16, 18), where, ORANGE, **SMALL)
    for rank, middle in enumerate(MIDDLES):
        if rank != late:
            box(axes, (middle - 8, 30, 16, 11), f"waits for\nrank {late}", ORANGE, **SMALL)
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
    left, width = OBSERVER - 15, 31
    reads = "reads the records in /dev/shm:\nwhich collective each rank\nis in, and since when"
    box(axes, (left, 9, width, 13), reads, GREEN, **SMALL)
    says = f"“ranks have waited {waited}” ({allowed}\nare allowed): “{reason}”"
    box(axes, (left, 31, width, 10), says.replace("has not", "has\nnot"), GREEN, **SMALL)
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
