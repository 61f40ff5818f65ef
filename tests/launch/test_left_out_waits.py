"""Each wait of the package that orders the work of a device is needed: without it, something is seen to go wrong."""

import re
from pathlib import Path

import pytest

from support.harness.mpi_launcher import Launcher
from support.left_out import sites

PROGRAM = Path(__file__).parent / "programs/left_out_waits.py"
DOCS = (Path(__file__).parents[2] / "docs/gpus.md").read_text(encoding="utf-8")  # says how many


@pytest.mark.usefixtures("simulated_accelerator")
def test_each_wait_is_missed(launcher: Launcher) -> None:
    job = launcher.run_python(2, PROGRAM, seconds=120, forked=True)
    assert job.returncode == 0, job.output
    print(job.stdout)
    lines = re.findall(r"^(seen|NOT SEEN) (.*) \| ", job.stdout, re.M)
    assert [line for line in lines if line[0] != "seen"] == []
    assert [place for _, place in lines] == [str(site) for site in sites()]
    number = len(lines)
    assert f"{number} by the syntax tree, was taken out in turn: {number} of {number}" in DOCS
