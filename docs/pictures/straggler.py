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
    worst = max(
        (event for event in events if event["name"] == "all_reduce"),
        key=lambda event: event["dur"],
    )
    middle = worst["ts"] + worst["dur"]
    begin, end = middle - 1.5 * worst["dur"], middle + 0.4 * worst["dur"]
    made = figure(3.1)
    axes = made.add_subplot(
        title="Timeline of 3 ranks: the others wait for rank 1",
        xlabel="milliseconds",
        xlim=(0, (end - begin) / 1e3),
        ylim=(2.6, -0.6),
        yticks=range(3),
        yticklabels=[f"rank {rank}" for rank in range(3)],
    )
    for name, (label, color) in NAMES.items():
        spans = [e for e in events if e["name"] == name and begin < e["ts"] + e["dur"] < end]
        for rank in range(3):
            bars = [((e["ts"] - begin) / 1e3, e["dur"] / 1e3) for e in spans if e["pid"] == rank]
            axes.broken_barh(bars, (rank - 0.35, 0.7), color=color, label=label if not rank else "")
    made.legend(loc="outside lower center", ncols=len(NAMES))
    return made


if __name__ == "__main__":
    save(draw(), __file__)
