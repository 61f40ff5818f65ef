"""scripts/test's own bookkeeping: what it counts, and that it goes on after a test that ended its job."""

import shutil
import sys
from pathlib import Path

import pytest

from support.harness import matrix
from support.harness import stage as stage_module
from support.harness.stage import Stage

TESTS = Path(__file__).parents[1]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with our conftest and one file of tests, in the place of the project."""
    shutil.copy(TESTS / "conftest.py", tmp_path)
    shutil.copy(TESTS.parent / "setup.cfg", tmp_path)
    monkeypatch.setattr(stage_module, "TOP", tmp_path)
    return tmp_path


def stage(mpi: str = "", ranks: int = 0) -> Stage:
    arguments = ["-o", f"pythonpath={TESTS}", "test_it.py"]
    return Stage("some", pytest=arguments, mpi=mpi, ranks=ranks, forked=ranks > 0)


@pytest.mark.parametrize("mpi", ["MPICH", pytest.param("Open MPI", marks=pytest.mark.slow)])
def test_goes_on_after_a_hang_and_a_crash(project: Path, mpi: str) -> None:
    (project / "test_it.py").write_text("""
import os, time, pytest
def test_a(): pass
def test_fails(): assert not "shown all the same"
@pytest.mark.time_limit(1)
def test_hangs():
    if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1": time.sleep(100)
def test_c(): pass
def test_crashes(): os._exit(3)
def test_d(): pass
""")
    some = stage(mpi, ranks=2)
    some.run()
    assert (some.passed, some.failed) == (3, 3), some.output
    assert "HUNG: test_it.py::test_hangs" in some.output
    assert "AssertionError: assert not 'shown all the same'" in some.output


def test_counts_without_mpi(project: Path) -> None:
    (project / "test_it.py").write_text("""
import pytest
def test_a(): pass
def test_b(): assert False
@pytest.fixture
def broken():
    yield
    raise OSError
def test_c(broken): pass
""")
    some = stage()
    some.run()
    assert (some.passed, some.failed) == (1, 2), some.output


@pytest.mark.parametrize(("mpi", "ranks"), [("", 0), ("MPICH", 2)])
def test_what_passes_when_run_again_is_told_of(project: Path, mpi: str, ranks: int) -> None:
    (project / "test_it.py").write_text("""
from pathlib import Path
def test_a(): pass
def test_once():
    Path("again").exists() or (Path("again").write_text(""), 1 / 0)
def test_always(): assert False
""")
    some = stage(mpi, ranks)
    some.run()
    assert (some.passed, some.failed) == (2, 1), some.output
    assert some.unsteady == ("test_it.py::test_once",)
    assert "ZeroDivisionError" in some.output


def test_many_failures_are_not_run_again(project: Path) -> None:
    (project / "test_it.py").write_text("""
import pytest
from pathlib import Path
@pytest.mark.parametrize("one", range(5))
def test_once(one):
    path = Path(str(one))
    assert path.exists() or path.write_text("")
""")
    some = stage()
    some.run()
    assert (some.passed, some.failed, some.unsteady) == (0, 5, ())


def test_a_job_that_ends_before_its_first_test_is_started_again(project: Path) -> None:
    (project / "test_it.py").write_text("""
import os
from pathlib import Path
Path("again").exists() or (Path("again").write_text(""), os._exit(1))
def test_a(): pass
""")
    some = stage()
    some.run()
    assert (some.passed, some.failed) == (1, 0), some.output


def test_a_file_that_cannot_be_imported_is_a_failure(project: Path) -> None:
    (project / "test_it.py").write_text("import no_such_module")
    some = stage()
    some.run()
    assert (some.passed, some.failed) == (0, 1), some.output


def test_no_tests_is_no_failure(project: Path) -> None:
    (project / "test_it.py").write_text("")
    some = stage()
    some.run()
    assert (some.passed, some.failed) == (0, 0), some.output


def test_a_failing_command_is_a_failure(project: Path) -> None:
    some = Stage("some", ["python", "-c", "raise SystemExit('no')"])
    some.run()
    assert (some.failed, some.output) == (1, "no\n")


def test_a_stage_may_run_another_environment_s_python(project: Path) -> None:
    other = project / "python"
    other.write_text(f'#!/bin/sh\nOTHER=yes exec "{sys.executable}" "$@"\n')
    other.chmod(0o755)
    (project / "test_it.py").write_text("""
import os
def test_a(): assert os.environ["OTHER"] == "yes"
""")
    for mpi, ranks in (("", 0), ("MPICH", 2)):
        some = stage(mpi, ranks)
        some.python = str(other)
        some.forked = False
        some.run()
        assert (some.passed, some.failed) == (1, 0), some.output


def test_xla_stages_are_there_where_torch_xla_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(matrix.XLA_PREFIX, raising=False)
    assert list(matrix.stages("xla")) == []
    monkeypatch.setenv(matrix.XLA_PREFIX, "/of/xla")
    some = list(matrix.stages("xla"))
    assert {stage.python for stage in some} == {"/of/xla/bin/python"}
    assert [(stage.mpi, stage.ranks, stage.pytest[-1]) for stage in some] == [
        ("", 0, "not slow and not mpi"),
        *((mpi, n, "not slow and mpi") for n in (1, 2) for mpi in ("MPICH", "Open MPI")),
    ]
