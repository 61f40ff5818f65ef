"""A rank that is killed is named, whenever that is: from the import of mpistrat to the interpreter's last moments."""

import re
from pathlib import Path

import pytest

from launch.fault_jobs import DIED, HOST_AND_PID, KERNEL, reports_in
from support.harness.mpi_launcher import Launcher

pytestmark = [pytest.mark.both_mpis("faults"), pytest.mark.waits]

PROGRAM = Path(__file__).parent / "programs" / "killed_at.py"
USUAL = ("import", "communicator", "atexit", "shutdown")
SLOW = (
    *("resolver", "init", "topology", "job_end", "records", "window", "strategy", "scope"),
    *("variable", "last collective", "end of strategy", "finalize", "before atexit"),
)
# Before Linux 6.15 a rank that was killed looks like one that has ended, once the launcher knows.
AT_THE_END = ("finalize", "after finalize", "before atexit", "atexit", "shutdown")


def cases() -> list[object]:
    slow = [(moment, rank) for moment in (*USUAL, *SLOW) for rank in (0, 1)]
    usual = [(moment, 1 - i % 2) for i, moment in enumerate(USUAL)]
    return [
        pytest.param(
            *case, marks=() if case in usual else pytest.mark.slow, id="-".join(map(str, case))
        )
        for case in slow
    ]


@pytest.mark.parametrize(("moment", "victim"), cases())
def test_a_death_is_told_whenever_it_is(
    launcher: Launcher, tmp_path: Path, moment: str, victim: int
) -> None:
    settings = {"MPISTRAT_STALL_SECONDS": "10", "MPISTRAT_START_SECONDS": "20"}
    job = launcher.run_python(2, PROGRAM, moment, str(victim), env=settings, cwd=tmp_path)
    assert job.returncode != 0, job.output
    assert job.seconds < 15, job.output
    assert job.left_behind == (), job.output
    if moment not in AT_THE_END or KERNEL >= (6, 15):
        said = re.findall(rf"^mpistrat: rank (\d) of 2{HOST_AND_PID} ({DIED})", job.stderr, re.M)
        assert [rank for rank, _ in said] == [str(victim)], job.output
        assert len(reports_in(tmp_path)) == 1
