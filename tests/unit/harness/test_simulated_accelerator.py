"""The simulated accelerator itself: it finds what it is there to find, and is compiled once."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from support.simulated_accelerator import build

TESTS = Path(__file__).parents[2]
CHECKS = TESTS / "support" / "simulated_accelerator" / "checks.py"


@pytest.mark.time_limit(120)
@pytest.mark.usefixtures("simulated_accelerator")
def test_it_computes_and_finds_what_is_out_of_order() -> None:
    """In a process of its own, for torch has one simulated kind of device for good."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CHECKS)]
    job = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=TESTS.parent)
    assert job.returncode == 0, job.stdout + job.stderr
    assert "skipped" not in job.stdout


def test_it_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when several processes, or threads, ask at once; and again when a source changes."""
    compiled = []

    def compile_slowly(compiler: str, made: Path) -> None:
        compiled.append(made)
        threading.Event().wait(0.05)
        made.touch()

    monkeypatch.setattr(build, "_compile", compile_slowly)
    monkeypatch.setattr(build.shutil, "which", lambda name: name)
    threads = [threading.Thread(target=build.library, args=(tmp_path,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiled == [build.library(tmp_path)]
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert build.library(tmp_path) not in compiled[:1]


def test_without_a_compiler_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with pytest.raises(build.NoCompiler, match="needs g\\+\\+"):
        build.library(tmp_path)
