"""Draw the timeline of three ranks in which one rank comes late to a step."""

from typing import Any

from matplotlib.figure import Figure
from style import BLUE, ORANGE, PURPLE, figure, recorded, save

NAMES = {
    "next(iterator)": ("next(iterator)", PURPLE),
    "backward": ("backward()", BLUE),
    "wait for the others": ("wait for the others", ORANGE),
}


def draw() -> Figure:
    (job,) = recorded("straggler")
    events: list[dict[str, Any]] = job["trace"]
    sums = (event for event in events if event["name"] == "all_reduce")
    longest = max(sums, key=lambda event: event["dur"])
    late = int(longest["args"]["last to enter"].removeprefix("rank "))
    begin = longest["ts"] - 0.5 * longest["dur"]
    end = longest["ts"] + 1.15 * longest["dur"]
    made = figure(3.1)
    axes = made.add_subplot(
        title=f"Timeline of 3 ranks: the others wait for rank {late}",
        xlabel="milliseconds",
        xlim=(0, (end - begin) / 1e3),
        ylim=(2.6, -0.6),
        yticks=range(3),
        yticklabels=[f"rank {rank}" for rank in range(3)],
    )
    for name, (label, color) in NAMES.items():
        of_name = [event for event in events if event["name"] == name]
        for rank in range(3):
            bars = []
            for event in of_name:
                if event["pid"] == rank:
                    left = (event["ts"] - begin) / 1e3
                    bars.append((left, event["dur"] / 1e3))
            once = label if rank == 0 else ""  # in the legend
            axes.broken_barh(bars, (rank - 0.35, 0.7), color=color, label=once)
    middle = (longest["ts"] + longest["dur"] / 2 - begin) / 1e3
    axes.text(middle, late, "does other work", ha="center", va="center")
    made.legend(loc="outside lower center", ncols=len(NAMES))
    return made


if __name__ == "__main__":
    save(draw(), __file__)
