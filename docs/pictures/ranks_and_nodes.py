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
        axes.text(left + HALF / 2 - 2, 3, title, ha="center", family="monospace", size=8)
        for node in sorted({line["node"] for line in job["lines"]}):
            ranks = [line for line in job["lines"] if line["node"] == node]
            draw_node(axes, left, 6 + node * 24, node, name, ranks)
    return figure


def draw_node(
    axes: Axes, left: float, top: float, node: int, name: str, ranks: list[dict[str, Any]]
) -> None:
    box(axes, (left, top, HALF - 3, 22), f"node {node}", GREY, filled=False)
    for column, line in enumerate(ranks):
        place = (left + 1.5 + 22.5 * column, top + 5, 21.5, 15.5)
        box(axes, place, f"rank {line['rank']}", GREEN, filled=False)
        found = line[name]
        width = 20 / len(found["replicas"])
        for i, (replica, device) in enumerate(
            zip(found["replicas"], found["devices"], strict=True)
        ):
            inner = (place[0] + 1 + width * i, top + 10, width - 0.6, 9.5)
            box(axes, inner, f"replica {replica}\non {device}", BLUE, size=8)


if __name__ == "__main__":
    save(draw(), __file__)
