"""Draw where three strategies keep the weights of four ranks."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from style import BLUE, GREEN, ORANGE, arrow, box, drawing, recorded, save

RANKS = range(4)
LEFT = 27
WIDTH = 18


def draw() -> Figure:
    (job,) = recorded("hosts_of_variables")
    lines = {line["rank"]: line for line in job["lines"]}
    figure, axes = drawing("Where the weights are: 4 ranks on 1 node", 59)
    draw_replicated(axes, 2, "MultiWorkerMirroredStrategy", lines)
    draw_replicated(axes, 22, "CentralStorageStrategy", lines)
    draw_servers(axes, 42, "ParameterServerStrategy", lines)
    return figure


def place_of(rank: int, top: float, ranks: int = 1) -> tuple[float, float, float, float]:
    """Of a box that begins at the column of `rank` and spans `ranks` columns."""
    return (LEFT + WIDTH * rank, top, WIDTH * ranks - 1.5, 6)


def draw_rank(axes: Axes, rank: int, top: float, text: str) -> None:
    box(axes, place_of(rank, top), text, BLUE)


def draw_replicated(axes: Axes, top: float, name: str, lines: dict[int, Any]) -> None:
    """The ranks that share memory have one box of weights, the others one each."""
    axes.text(0, top + 3, name.replace("Strategy", "\nStrategy"), va="center", family="monospace")
    for rank in RANKS:
        draw_rank(axes, rank, top, f"rank {rank}")
        middle = LEFT + WIDTH * rank + (WIDTH - 1.5) / 2
        arrow(axes, (middle, top + 9), (middle, top + 6))
    shared_by = [tuple(line[name]["shared by"]) for line in lines.values()]
    sharing = {rank for ranks in shared_by for rank in ranks}
    alone = [(rank,) for rank in RANKS if rank not in sharing]
    for ranks in dict.fromkeys([*shared_by, *alone]):
        if ranks:
            text = "weights" if len(ranks) == 1 else "one copy of the weights"
            box(axes, place_of(ranks[0], top + 9, len(ranks)), text, GREEN)


def draw_servers(axes: Axes, top: float, name: str, lines: dict[int, Any]) -> None:
    axes.text(0, top + 3, name.replace("Strategy", "\nStrategy"), va="center", family="monospace")
    (server,) = set(RANKS) - set(lines)
    (address,) = {line[name]["device"] for line in lines.values()}
    for rank, line in lines.items():
        draw_rank(axes, rank, top, f"rank {rank}: {line[name]['task']}")
    parts = address.split("/")[1:4]
    job, _, task = (part.partition(":")[2] for part in parts)
    left = LEFT + WIDTH * server
    draw_rank(axes, server, top, f"rank {server}: {job} {task}")
    box(axes, place_of(server, top + 9), "weights", GREEN)
    middle = left + 8
    arrow(axes, (middle, top + 9), (middle, top + 6))
    # The way of messages, from the workers to the weights.
    begin = LEFT + 8
    end = left - 0.3
    height = top + 12
    axes.plot([begin, end], [height, height], color=ORANGE)
    for rank in lines:
        middle = LEFT + WIDTH * rank + 8
        axes.plot([middle, middle], [height, top + 6], color=ORANGE)
    arrow(axes, (end - 1, height), (end, height), ORANGE)
    center = (begin + end) / 2
    axes.text(center, height + 2.5, "messages: pull and push", ha="center", color=ORANGE)


if __name__ == "__main__":
    save(draw(), __file__)
