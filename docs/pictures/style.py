"""How the pictures look. Their colours are legible on a light and on a dark page, and their texts stay texts.

`python docs/pictures/NAME.py [FOLDER]` writes NAME.svg beside itself, or into FOLDER.
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

HERE = Path(__file__).resolve().parent
INCHES = 7.4  # the width of a page's text
# White text on each of them, and each of them on white and on black, has a contrast of 3 or more.
GREY = "#727c88"
BLUE = "#3276c0"
ORANGE = "#b8621b"
GREEN = "#348a5a"
PURPLE = "#8a5cc2"
RED = "#c8443f"

mpl.rcParams.update(
    {
        "axes.edgecolor": GREY,
        "axes.labelcolor": GREY,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlecolor": GREY,
        "axes.titlelocation": "left",
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "font.size": 9,
        "legend.frameon": False,
        "legend.labelcolor": GREY,
        "savefig.facecolor": "none",
        "svg.fonttype": "none",
        "svg.hashsalt": "mpistrat",
        "text.color": GREY,
        "xtick.color": GREY,
        "ytick.color": GREY,
    }
)


def recorded(name: str) -> list[dict[str, Any]]:
    """The jobs that `record.py` has recorded under this name."""
    text = (HERE / "recorded" / f"{name}.json").read_text(encoding="utf-8")
    return json.loads(text)["jobs"]


def figure(inches: float) -> Figure:
    """An empty figure of this height."""
    made = Figure(figsize=(INCHES, inches), layout="constrained")
    FigureCanvasAgg(made)
    return made


def drawing(title: str, height: float) -> tuple[Figure, Axes]:
    """A sheet of 100 by `height` units without axes; the origin is at the top left."""
    made = figure(INCHES * height / 100 + 0.3)
    axes = made.add_subplot(xlim=(0, 100), ylim=(height, 0), title=title)
    axes.set_axis_off()
    return made, axes


def box(
    axes: Axes,
    place: tuple[float, float, float, float],
    text: str,
    color: str,
    *,
    filled: bool = True,
    **font: Any,
) -> None:
    """Draw a box with a text: in its middle, or at its top if the box is not `filled`.

    Args: place: left, top, width, height.   font: arguments of matplotlib's text.
    """
    left, top, width, height = place
    axes.add_patch(
        FancyBboxPatch(
            (left, top),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=1",
            facecolor=color if filled else "none",
            edgecolor=color,
            linewidth=1.2,
        )
    )
    middle = left + width / 2
    if filled:
        style = {"color": "white", "va": "center", **font}
        axes.text(middle, top + height / 2, text, ha="center", **style)
    else:
        axes.text(
            middle,
            top + 1,
            text,
            ha="center",
            va="top",
            **{"color": color, "weight": "bold", **font},
        )


def arrow(
    axes: Axes, begin: tuple[float, float], end: tuple[float, float], color: str = GREY
) -> None:
    """Draw an arrow between two points."""
    style = {"arrowstyle": "-|>", "color": color, "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, begin, arrowprops=style)


def save(made: Figure, script: str) -> None:
    """Write the picture of `script`. Args: script: its `__file__`."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    path = folder / f"{Path(script).stem}.svg"
    made.savefig(path, metadata={"Date": None})
