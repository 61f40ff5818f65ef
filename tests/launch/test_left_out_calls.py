"""A rank leaves out a call and goes on: one rank gives a notice, and the last words of the job repeat it."""

from pathlib import Path

import pytest

from support.harness.mpi_launcher import Launcher

PROGRAM = """
import mpistrat as ms

strategy = ms.MultiWorkerMirroredStrategy()
if strategy.rank != 1:
    strategy.reduce("sum", 1.0, axis=None)
strategy.reduce("sum", 10.0, axis=None)
strategy.reduce("sum", 100.0, axis=None)
strategy.reduce("sum", 1000.0, axis=None)
"""


@pytest.mark.waits
def test_a_call_that_is_left_out_is_named(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    job = Launcher.named("MPICH").run_python(3, program, forked=True)
    assert job.returncode != 0, job.output
    place = f"rank 1 left out the call at {program}:6 in <module>: rank "
    assert job.stderr.count(f"mpistrat: {place}") == 1, job.output
    _, last_words = job.stderr.split(" came to its end ")
    assert f"\n{place}" in last_words, job.output
