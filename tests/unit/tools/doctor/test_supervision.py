"""A rank's process that crashes, hangs or tells what it should: its parent survives it, and knows how far it came."""

import sys
import tempfile
from pathlib import Path

import pytest

from mpistrat.tools.doctor import command
from mpistrat.tools.doctor.command import Outcome, run_rank
from mpistrat.tools.doctor.facts import RankFacts

# In the place of `python -m mpistrat.tools.doctor.rank_process FD`
PROGRAM = """#!{python}
import json, os, sys, time
told = os.fdopen(int(sys.argv[-1]), "w")
assert json.load(sys.stdin)["host"] == "n1"
def tell(**what):
    print(json.dumps(what), file=told, flush=True)
{body}
"""


def run(body: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Outcome:
    program = folder / "program"
    program.write_text(PROGRAM.format(python=sys.executable, body=body))
    program.chmod(0o755)
    monkeypatch.setattr(command.sys, "executable", str(program))
    return run_rank(RankFacts(host="n1"))


def test_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = """
tell(stage="MPI_Init", seconds=60)
tell(library={"path": "/opt/libmpi.so.12"})
print("no PMI", file=sys.stderr, flush=True)
os.kill(os.getpid(), 11)
"""
    outcome = run(body, tmp_path, monkeypatch)
    assert outcome.failure is not None
    assert (outcome.failure.kind, outcome.failure.stage) == ("ended", "MPI_Init")
    assert outcome.failure.text == "killed by SIGSEGV"
    assert outcome.failure.words == "no PMI"
    assert outcome.library is not None
    assert outcome.library.path == "/opt/libmpi.so.12"


def test_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = run('tell(stage="MPI_Init", seconds=0.5)\ntime.sleep(600)', tmp_path, monkeypatch)
    assert outcome.failure is not None
    assert (outcome.failure.kind, outcome.failure.stage) == ("late", "MPI_Init")
    assert outcome.failure.text == "it did not end within 0.5 s"


def test_one_that_ends_early_without_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = run("sys.exit(0)", tmp_path, monkeypatch)
    assert outcome.failure is not None
    assert outcome.failure.text == "it ended without a word"


def test_a_failure_that_it_tells_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = 'tell(failure={"stage": "MPI_Init", "kind": "topology", "text": "2 ranks"})'
    outcome = run(body, tmp_path, monkeypatch)
    assert outcome.failure is not None
    assert outcome.failure.text == "2 ranks"


def test_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("tell(rank=1)", tmp_path, monkeypatch) == Outcome()


def test_no_folder_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory check says so, if this does not end before."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    assert run("tell(rank=1)", tmp_path, monkeypatch) == Outcome()


def test_an_end_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MPI_Finalize: what was told counts."""
    monkeypatch.setattr(command, "SECONDS_TO_END", 0.5)
    outcome = run("tell(rank=1)\ntime.sleep(600)", tmp_path, monkeypatch)
    assert outcome.failure is None
    assert outcome.left == "MPI_Finalize did not return within 0.5 s"
