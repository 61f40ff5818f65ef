"""Draw nodes, their ranks, and the replicas and devices of each rank, under two strategies."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from style import BLUE, GREEN, GREY, box, drawing, recorded, save

HALF = 50


def draw() -> Figure:
    (job,) = recorded("ranks_and_nodes")
    figure, axes = drawing("Nodes, ranks, replicas and devices: mpirun -n 4 on 2 nodes", 54)
    titles = {
        "one": "MultiWorkerMirroredStrategy()",
        "two": 'the same with devices=["cpu:0", "cpu:1"]',
    }
    for column, (name, title) in enumerate(titles.items()):
        left = 1 + column * HALF
        middle = left + HALF / 2 - 2
        axes.text(middle, 3, title, ha="center", family="monospace", size=8)
        for node in sorted({line["node"] for line in job["lines"]}):
            ranks = [line for line in job["lines"] if line["node"] == node]
            draw_node(axes, left, 6 + node * 24, node, name, ranks)
    return figure


def draw_node(
    axes: Axes, left: float, top: float, node: int, name: str, ranks: list[dict[str, Any]]
) -> None:
    whole = (left, top, HALF - 3, 22)
    box(axes, whole, f"node {node}", GREY, filled=False)
    for column, line in enumerate(ranks):
        of_rank = left + 1.5 + 22.5 * column
        title = f"rank {line['rank']}"
        box(axes, (of_rank, top + 5, 21.5, 15.5), title, GREEN, filled=False)
        replicas = line[name]["replicas"]
        devices = line[name]["devices"]
        width = 20 / len(replicas)
        for i, replica in enumerate(replicas):
            inner = (of_rank + 1 + width * i, top + 10, width - 0.6, 9.5)
            box(axes, inner, f"replica {replica}\non {devices[i]}", BLUE, size=8)


if __name__ == "__main__":
    save(draw(), __file__)
