"""Draw where three strategies keep the weights of four ranks."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from style import BLUE, GREEN, ORANGE, arrow, box, drawing, recorded, save

RANKS = range(4)
LEFT, WIDTH = 27, 18


def draw() -> Figure:
    (job,) = recorded("hosts_of_variables")
    lines = {line["rank"]: line for line in job["lines"]}
    figure, axes = drawing("Where the weights are: 4 ranks on 1 node", 59)
    draw_replicated(axes, 2, "MultiWorkerMirroredStrategy", lines)
    draw_replicated(axes, 22, "CentralStorageStrategy", lines)
    draw_servers(axes, 42, "ParameterServerStrategy", lines)
    return figure


def draw_rank(axes: Axes, rank: int, top: float, text: str) -> None:
    box(axes, (LEFT + WIDTH * rank, top, WIDTH - 1.5, 6), text, BLUE)


def draw_replicated(axes: Axes, top: float, name: str, lines: dict[int, Any]) -> None:
    """The ranks that share memory have one box of weights, the others one each."""
    axes.text(0, top + 3, name.replace("Strategy", "\nStrategy"), va="center", family="monospace")
    for rank in RANKS:
        draw_rank(axes, rank, top, f"rank {rank}")
        middle = LEFT + WIDTH * rank + (WIDTH - 1.5) / 2
        arrow(axes, (middle, top + 9), (middle, top + 6))
    places = {tuple(line[name]["shared by"]) or (rank,) for rank, line in lines.items()}
    places |= {(rank,) for rank in RANKS if not any(rank in ranks for ranks in places)}
    for ranks in places:
        place = (LEFT + WIDTH * ranks[0], top + 9, WIDTH * len(ranks) - 1.5, 6)
        box(axes, place, "weights" if len(ranks) == 1 else "one copy of the weights", GREEN)


def draw_servers(axes: Axes, top: float, name: str, lines: dict[int, Any]) -> None:
    axes.text(0, top + 3, name.replace("Strategy", "\nStrategy"), va="center", family="monospace")
    (server,) = set(RANKS) - set(lines)
    (address,) = {line[name]["device"] for line in lines.values()}
    for rank, line in lines.items():
        draw_rank(axes, rank, top, f"rank {rank}: {line[name]['task']}")
    job, _, task = (part.partition(":")[2] for part in address.split("/")[1:4])
    left = LEFT + WIDTH * server
    draw_rank(axes, server, top, f"rank {server}: {job} {task}")
    box(axes, (left, top + 9, WIDTH - 1.5, 6), "weights", GREEN)
    arrow(axes, (left + 8, top + 9), (left + 8, top + 6))
    begin, end = LEFT + 8, left - 0.3
    axes.plot([begin, end], [top + 12, top + 12], color=ORANGE)
    for rank in lines:
        middle = LEFT + WIDTH * rank + 8
        axes.plot([middle, middle], [top + 12, top + 6], color=ORANGE)
    arrow(axes, (end - 1, top + 12), (end, top + 12), ORANGE)
    axes.text((begin + end) / 2, top + 14.5, "messages: pull and push", ha="center", color=ORANGE)


if __name__ == "__main__":
    save(draw(), __file__)
