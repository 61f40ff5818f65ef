"""Programs that hang, crash, are not there, or leave something behind."""

import signal
import tempfile
import time
from pathlib import Path

import pytest

from mpistrat.tools.doctor.children import ask, how_it_ended, last_words


def test_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAME", "x")
    answer = ask(["sh", "-c", "echo $NAME; echo oh >&2; exit 3"], 30)
    assert (answer.output, answer.errors, answer.ended) == ("x\n", "oh\n", "exit code 3")
    assert ask(["true"], 30).ended == ""


def test_no_folder_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    assert ask(["echo", "yes"], 30).output == "yes\n"


def test_one_that_is_not_there() -> None:
    assert ask(["no-such-program"], 30).ended.startswith("it cannot be started")


@pytest.mark.parametrize("program", ["sleep 600", "sleep 600 & echo started; wait"])
def test_one_that_hangs(program: str) -> None:
    answer = ask(["sh", "-c", program], 0.5)
    assert (answer.ended, answer.late) == ("no end within 0.5 s", True)


def test_what_it_started_keeps_nobody_waiting() -> None:
    started = time.monotonic()
    assert ask(["sh", "-c", "sleep 600 & exit 0"], 50).ended == ""
    assert time.monotonic() - started < 50


def test_words() -> None:
    assert how_it_ended(-signal.SIGSEGV) == "killed by SIGSEGV"
    assert last_words("a\n-----\n\n  b\nc\n******\n", 2) == "b / c"
