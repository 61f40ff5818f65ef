"""The table of the MPISTRAT_* variables."""

import ast
import re
from pathlib import Path

import pytest

from mpistrat.errors import TopologyError
from mpistrat.settings import SETTINGS, Setting, rank_pid

TOP = Path(__file__).parents[2]
PACKAGE = TOP / "mpistrat"
NAMES = {setting.name for setting in SETTINGS}


def files_for_users() -> list[Path]:
    """What users read or start, and the package."""
    folders = (PACKAGE, TOP / "slurm", TOP / "docs")
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    files += [*TOP.glob("scripts/*.py"), TOP / "README.md"]
    return [path for path in files if path.suffix in {".py", ".md", ".sbatch", ".rst"}]


def test_every_variable_that_is_mentioned_is_in_the_table() -> None:
    found = {
        (name, path.relative_to(TOP).as_posix())
        for path in files_for_users()
        for name in re.findall(r"\bMPISTRAT_[A-Z_]*[A-Z]", path.read_text())
    }
    assert {name for name, _ in found} >= NAMES
    assert [row for row in sorted(found) if row[0] not in NAMES] == []


def test_no_other_module_reads_one() -> None:
    """The name of a variable, as text of its own, is what a module needs to read it."""
    written = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in NAMES
    }
    assert written == {"settings.py"}


def test_each_row_says_all() -> None:
    assert len(NAMES) == len(SETTINGS)
    for row in SETTINGS:
        assert all((row.unit, row.read_by)), row
        assert re.fullmatch(r"[A-Z].*\.", row.meaning), row
    assert [row for row in SETTINGS if row.internal] == [rank_pid]


def test_the_default_is_a_text_that_can_be_read() -> None:
    for row in SETTINGS:
        assert row({}) == row({row.name: row.default})


def test_a_text_without_a_value() -> None:
    setting = Setting("MPISTRAT_X", "1", "apples", "nobody", "A number.", int, "a number of apples")
    assert (setting({}), setting({"MPISTRAT_X": "7"})) == (1, 7)
    with pytest.raises(TopologyError, match=r"MPISTRAT_X='many': expected a number of apples"):
        setting({"MPISTRAT_X": "many"})
