"""Each picture of docs/pictures is drawn by its script, from the code or from a recorded run, and shown on a page."""

import itertools
import json
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import matplotlib as mpl
import pytest
from matplotlib.axis import Tick
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

TOP = Path(__file__).parents[2]
DOCS = TOP / "docs"
FOLDER = DOCS / "pictures"
SCRIPTS = sorted({*FOLDER.glob("*.py")} - {FOLDER / "style.py", FOLDER / "record.py"})
PAGES = [TOP / "README.md", *sorted(DOCS.rglob("*.md"))]
SVG = "{http://www.w3.org/2000/svg}"
FEWEST_TEXTS, FEWEST_SHAPES, FEWEST_WORDS = 6, 7, 8
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
POINTS = 4.0  # between matplotlib 3.10 and 3.11, which measure texts differently, a shape moves by up to 3.2


@pytest.fixture(params=SCRIPTS, ids=lambda script: script.stem)
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Each script, with the path and the settings of matplotlib of a process of its own."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.delitem(sys.modules, "style", raising=False)
    with mpl.rc_context():
        yield request.param


def texts_of(picture: ElementTree.Element) -> list[str]:
    return ["".join(text.itertext()).strip() for text in picture.iter(f"{SVG}text")]


def shapes_of(picture: ElementTree.Element) -> tuple[list[str], list[float]]:
    """The form and the colours of each shape, and the numbers of all. The places of texts are left out."""
    forms, places = [], []
    for kind in ("path", "rect", "use"):
        for shape in picture.iter(SVG + kind):
            place = " ".join(shape.get(name, "") for name in ("d", "x", "y", "width", "height"))
            colours = [shape.get(name, "") for name in ("fill", "stroke", "style")]
            forms.append(" ".join([kind, *NUMBER.sub("", place).split(), *colours]))
            places += map(float, NUMBER.findall(place))
    return forms, places


def test_there_are_eight_pictures() -> None:
    assert len(SCRIPTS) >= 8
    assert [path.stem for path in sorted(FOLDER.glob("*.svg"))] == [path.stem for path in SCRIPTS]


def test_a_script_draws_its_picture(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure,
        "savefig",
        lambda self, *args, **how: (figures.append(self), save(self, *args, **how)),
    )
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path)])
    runpy.run_path(str(script), run_name="__main__")
    (made,) = tmp_path.iterdir()
    picture = ElementTree.parse(made).getroot()
    forms, places = shapes_of(picture)
    assert len(texts_of(picture)) >= FEWEST_TEXTS
    assert len(forms) >= FEWEST_SHAPES
    committed = ElementTree.parse(FOLDER / made.name).getroot()
    assert texts_of(picture) == texts_of(committed)
    assert shapes_of(committed) == (forms, pytest.approx(places, abs=POINTS))
    assert figures or picture.findtext(f"{SVG}title")
    for figure in figures:
        check_layout(figure)


def check_layout(figure: Figure) -> None:
    """It has a title, and axes that have names; no text is cut or lies on another."""
    FigureCanvasAgg(figure).draw()
    for axes in figure.axes:
        assert axes.get_title() or axes.get_title("left")
        assert not axes.axison or axes.get_xlabel(), "the axis has no name"
    boxes = list(boxes_of_texts(figure))
    for text, box in boxes:
        inside = figure.bbox.padded(1)
        assert all(inside.contains(*corner) for corner in box.corners()), text
    for (text, box), (other, other_box) in itertools.combinations(boxes, 2):
        assert not box.padded(-1).overlaps(other_box.padded(-1)), (text, other)


def boxes_of_texts(figure: Figure) -> Iterator[tuple[str, Bbox]]:
    """Without the numbers of axes, which matplotlib places."""
    renderer = figure.canvas.get_renderer()
    ticks = figure.findobj(Tick)
    numbers = {id(label) for tick in ticks for label in (tick.label1, tick.label2)}
    for text in figure.findobj(Text):
        if text.get_text().strip() and id(text) not in numbers:
            yield text.get_text(), Text.get_window_extent(text, renderer)


def test_each_picture_is_shown_with_words_for_those_who_do_not_see_it() -> None:
    shown = {}
    for page in PAGES:
        images = re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
        shown |= {(page.parent / path).resolve(): words for words, path in images}
    for script in SCRIPTS:
        words = shown.get(script.with_suffix(".svg"), "")
        assert len(words.split()) >= FEWEST_WORDS, script.stem


def test_recordings_name_their_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = runpy.run_path(str(FOLDER / "record.py"))["COMMANDS"]
    files = sorted((FOLDER / "recorded").glob("*.json"))
    recorded = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}
    assert {name: recording["commands"] for name, recording in recorded.items()} == commands
    for program in re.findall(r"docs/pictures/programs/\w+\.py", str(commands)):
        assert (TOP / program).is_file(), program
