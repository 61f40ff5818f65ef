"""The working directory hangs, as when a cluster's file system is gone: the job speaks all the same, and ends."""

import re
from pathlib import Path

import pytest

from support.harness.mpi_launcher import Launcher
from support.hung_folder import hung_folder

pytestmark = [pytest.mark.both_mpis("faults"), pytest.mark.waits]

PROGRAM = """
import os, sys
import numpy as np, mpistrat as ms
strategy = ms.MultiWorkerMirroredStrategy()
strategy.reduce("SUM", np.float32(1), axis=None)
if strategy.extended.communicator.rank == 1:
    os.path.exists("now")  # from now on it hangs
    if sys.argv[1] == "dies":
        os.kill(os.getpid(), 9)
    open("checkpoint", "w")
strategy.reduce("SUM", np.float32(1), axis=None)
"""


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("writes", r"rank 1 has not come to it"),
        pytest.param(
            "dies",
            r"rank 1 of 2 \(.*\) (was killed by SIGKILL|died without a word)",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_working_directory_that_hangs(
    launcher: Launcher, tmp_path: Path, fault: str, words: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with hung_folder(tmp_path / "hung"):
        job = launcher.run_python(
            2,
            program,
            fault,
            cwd=tmp_path / "hung",
            env={"MPISTRAT_STALL_SECONDS": "2"},
            seconds=30,
        )
    assert job.returncode != 0
    assert re.search(words, job.stderr), job.output
    assert job.seconds < 12, job.output
    assert job.left_behind == (), job.output
