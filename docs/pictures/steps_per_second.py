"""Draws steps_per_second.svg from the recorded results: training steps of mpistrat and of its peers, by model.

Usage: python docs/pictures/steps_per_second.py [FOLDER]    (default: the folder of this script)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks" / "results"
MODELS = {
    "mlp": "MLP, 4.2 M parameters",
    "mlp-large": "MLP, 25 M parameters",
    "resnet50": "ResNet-50, 26 M parameters",
    "transformer": "transformer, 4.9 M parameters",
}
# By the name in the picture, the contestants of a recorded run. The fastest of them counts.
CONTESTANTS = {
    "mpistrat: a strategy": ["mpistrat"],
    "mpistrat run: DDP": ["DDP, mpistrat"],
    "DDP on gloo": ["DDP, gloo"],
    "loop of mpi4py": ["raw MPI, flat buffer", "raw MPI, .grad in the buffer"],
}
COLORS = ["#c2410c", "#f59e0b", "#64748b", "#94a3b8"]


def main() -> None:
    mpl.use("Agg")
    # The same bytes from the same results.
    mpl.rcParams |= {"svg.hashsalt": "steps", "font.size": 9}
    figure, panels = pyplot.subplots(2, 2, figsize=(9, 5.5), layout="constrained")
    for axes, (model, title) in zip(panels.flat, MODELS.items(), strict=True):
        recorded = json.loads((RESULTS / f"mpich-2-ranks-{model}.json").read_text("utf-8"))
        draw(axes, title, recorded)
    where = recorded["surroundings"]
    figure.suptitle(
        f"Training steps per second, {where['ranks']} ranks with one core each (more is better)\n"
        f"one machine, {where['cpu']}, shared with other programs; {where['mpi'].replace(' Version:', '')}",
    )
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    figure.savefig(folder / "steps_per_second.svg", metadata={"Date": None})


def draw(axes: pyplot.Axes, title: str, recorded: dict) -> None:
    """One model: a bar for the median of each contestant, and a point for each round."""
    rows = {row["training step"]: row for row in recorded["rows"] if not row["wrong"]}
    for place, names in enumerate(CONTESTANTS.values()):
        ran = [rows[name] for name in names if name in rows]
        if not ran:
            axes.text(0, place, "  not recorded", va="center", color="gray")
            continue
        fastest = min(ran, key=lambda row: row["ms"])
        steps = [1000 / ms for ms in fastest["samples"]]
        axes.barh(place, 1000 / fastest["ms"], color=COLORS[place])
        axes.plot(steps, [place] * len(steps), "k.", alpha=0.35, markersize=3)
        axes.text(max(steps), place, f"  {1000 / fastest['ms']:.3g}", va="center")
    axes.set(yticks=range(len(CONTESTANTS)), yticklabels=CONTESTANTS)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    where = recorded["surroundings"]
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel(f"recorded {where['started'][:10]}, torch {where['torch']}", color="dimgray")


if __name__ == "__main__":
    main()
