"""Draw the recorded training steps of mpistrat and of its peers, by model."""

import json
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from style import BLUE, GREEN, GREY, HERE, ORANGE, figure, save

RESULTS = HERE.parents[1] / "benchmarks" / "results"
MODELS = {
    "mlp": "MLP, 4.2 M parameters",
    "mlp-large": "MLP, 25 M parameters",
    "resnet50": "ResNet-50, 26 M parameters",
    "transformer": "transformer, 4.9 M parameters",
}
# By the name in the picture: the contestants of a recorded run, of which the fastest counts, and the colour.
CONTESTANTS = {
    "mpistrat: a strategy": (["mpistrat"], ORANGE),
    "mpistrat run: DDP": (["DDP, mpistrat"], GREEN),
    "DDP on gloo": (["DDP, gloo"], BLUE),
    "loop of mpi4py": (["raw MPI, flat buffer", "raw MPI, .grad in the buffer"], GREY),
}


def draw() -> Figure:
    made = figure(4.6)
    panels = made.subplots(2, 2, sharey=True)
    panels[0, 0].set_yticks(range(len(CONTESTANTS)), list(CONTESTANTS))
    panels[0, 0].invert_yaxis()
    for axes, (model, title) in zip(panels.flat, MODELS.items(), strict=True):
        text = (RESULTS / f"mpich-2-ranks-{model}.json").read_text(encoding="utf-8")
        recorded = json.loads(text)
        draw_model(axes, title, recorded)
        where = recorded["surroundings"]
        axes.set_xlabel(f"recorded {where['started'][:10]}, torch {where['torch']}")
    made.suptitle(
        f"Training steps per second, {where['ranks']} ranks with one core each: more is better\n"
        f"One machine ({where['cpu']}), shared with other programs; "
        f"{where['mpi'].replace(' Version:', '')}",
        size=10,
    )
    return made


def draw_model(axes: Axes, title: str, recorded: dict[str, Any]) -> None:
    """Draw a bar for the median of each contestant, and a point for each round."""
    right = [row for row in recorded["rows"] if not row["wrong"]]
    rows = {row["training step"]: row for row in right}
    for place, (names, color) in enumerate(CONTESTANTS.values()):
        ran = [rows[name] for name in names if name in rows]
        if not ran:
            tell(axes, 0, place, "not recorded")
            continue
        fastest = min(ran, key=lambda row: row["ms"])
        median = 1000 / fastest["ms"]
        steps = [1000 / ms for ms in fastest["samples"]]
        axes.barh(place, median, color=color)
        places = [place] * len(steps)
        axes.plot(steps, places, "o", color=GREY, mfc="white", markersize=3)
        tell(axes, max(steps), place, f"{median:.3g}")
    axes.margins(x=0.2)
    axes.set_title(title)


def tell(axes: Axes, x: float, y: float, text: str) -> None:
    axes.annotate(text, (x, y), (5, 0), textcoords="offset points", va="center")


if __name__ == "__main__":
    save(draw(), __file__)
