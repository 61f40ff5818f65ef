"""The table of the MPISTRAT_* variables."""

import ast
import importlib
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpistrat import settings
from mpistrat.errors import TopologyError
from mpistrat.settings import (
    SETTINGS,
    Setting,
    cache_folder,
    raises_on_stall,
    rank_pid,
    shared_bytes,
    stall_seconds,
    trace_folder,
    transport_settings,
)

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


# MPISTRAT_SHARED_MB


def test_megabytes() -> None:
    assert shared_bytes({}) == math.inf
    assert shared_bytes({"MPISTRAT_SHARED_MB": "2.5"}) == 2.5e6
    assert shared_bytes({"MPISTRAT_SHARED_MB": "0"}) == 0


@pytest.mark.parametrize("text", ["much", "-1", "", "nan"])
def test_what_is_no_amount(text: str) -> None:
    with pytest.raises(TopologyError, match="expected megabytes of shared memory"):
        shared_bytes({"MPISTRAT_SHARED_MB": text})


# MPISTRAT_CACHE


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HOME": "/home/ann"}, "/home/ann/.cache/mpistrat"),
        ({"HOME": "/home/ann", "XDG_CACHE_HOME": "/scratch/ann"}, "/scratch/ann/mpistrat"),
        ({"HOME": "/home/ann", "XDG_CACHE_HOME": "relative"}, "/home/ann/.cache/mpistrat"),
        ({"HOME": "/home/ann", "MPISTRAT_CACHE": "/scratch/costs"}, "/scratch/costs"),
        pytest.param(
            {"HOME": "/home/ann", "MPISTRAT_CACHE": "here"},
            os.path.abspath("here"),
            id="environ4-here",  # not the folder of whoever runs the tests
        ),
        ({"HOME": "/home/ann", "MPISTRAT_CACHE": "Off"}, None),
        ({"HOME": "/home/ann", "MPISTRAT_CACHE": ""}, "/home/ann/.cache/mpistrat"),
        ({"HOME": "nowhere"}, None),
    ],
)
def test_folders(environ: dict[str, str], expected: str | None) -> None:
    assert cache_folder(environ) == expected


# MPISTRAT_TRACE


@pytest.fixture
def as_in_a_new_process() -> Iterator[None]:
    importlib.reload(settings)
    yield
    importlib.reload(settings)


def test_nothing_is_traced_unless_a_folder_is_named(as_in_a_new_process: None) -> None:
    assert trace_folder({}) is None
    assert trace_folder({"MPISTRAT_TRACE": ""}) is None


def test_a_relative_folder_is_this_process_s(as_in_a_new_process: None) -> None:
    assert trace_folder({"MPISTRAT_TRACE": "a/b"}) == os.path.join(os.getcwd(), "a", "b")
    assert trace_folder({"MPISTRAT_TRACE": "/a/b"}) == "/a/b"


def test_programs_that_this_one_starts_are_not_traced(as_in_a_new_process: None) -> None:
    environ = {"MPISTRAT_TRACE": "/a/b", "HOME": "/"}
    assert trace_folder(environ) == "/a/b"
    assert environ == {"HOME": "/"}
    assert trace_folder(environ) == "/a/b"


# What of the environment changes how fast MPI is


def test_settings() -> None:
    """Not what a launcher tells each job or rank."""
    ours = {"FI_PROVIDER": "cxi", "OMPI_MCA_btl": "tcp,self", "UCX_TLS": "tcp"}
    others = {
        "HOME": "/home/ann",
        "OMPI_MCA_ess_base_jobid": "1",
        "PMI_RANK": "0",
        "MPIR_CVAR_CH3_INTERFACE_HOSTNAME": "node7",
    }
    assert transport_settings({**others, **ours}) == ours


def test_limits_of_the_environment() -> None:
    assert stall_seconds({}) == 60
    assert stall_seconds({"MPISTRAT_STALL_SECONDS": "0"}) == 0
    assert not raises_on_stall({})
    assert raises_on_stall({"MPISTRAT_ON_STALL": "raise"})
    with pytest.raises(TopologyError, match="MPISTRAT_STALL_SECONDS='soon'"):
        stall_seconds({"MPISTRAT_STALL_SECONDS": "soon"})
    with pytest.raises(TopologyError, match="expected end or raise"):
        raises_on_stall({"MPISTRAT_ON_STALL": "ignore"})
