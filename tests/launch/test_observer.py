"""What the observer leaves alone, and what it sees although it is hard to see."""

import re
import sys
from pathlib import Path

import pytest

from support.harness.mpi_launcher import Job, Launcher, run_job

pytestmark = [pytest.mark.both_mpis("faults"), pytest.mark.waits]

PROGRAM = Path(__file__).parent / "programs" / "observed.py"
LIMIT = 2.0


def line_of(scenario: str) -> int:
    lines = PROGRAM.read_text(encoding="utf-8").splitlines()
    return next(n for n, line in enumerate(lines, 1) if line.endswith(f"  # {scenario}"))


def run(
    launcher: Launcher, folder: Path, scenario: str, *words: str, ranks: int = 2, **env: str
) -> Job:
    settings = {"MPISTRAT_STALL_SECONDS": f"{LIMIT:g}", **env}
    job = launcher.run_python(
        ranks, PROGRAM, scenario, folder, *words, env=settings, cwd=folder, seconds=60
    )
    assert job.left_behind == (), job.output
    return job


def test_files_of_the_program_stay(launcher: Launcher, tmp_path: Path) -> None:
    job = run(launcher, tmp_path, "own_mapping")
    files = list(Path("/dev/shm").glob(f"{tmp_path.name}-*"))
    for file in files:
        file.unlink()
    assert job.returncode == 0, job.output
    assert len(files) == 2


def test_a_program_may_wait_for_all_its_children(launcher: Launcher, tmp_path: Path) -> None:
    job = run(launcher, tmp_path, "waits_for_all_children")
    assert job.returncode == 0, job.output
    assert job.stdout.count("all reaped") == 2


def test_one_observer_for_strategies_over_some_ranks(launcher: Launcher, tmp_path: Path) -> None:
    job = run(launcher, tmp_path, "halves_first", ranks=4)
    assert job.returncode != 0
    assert "rank 3 has not come to it" in job.stderr, job.output
    assert f"observed.py:{line_of('halves_first')} in halves_first" in job.stderr
    assert "other nodes" not in job.stderr


def test_a_working_directory_that_is_gone(launcher: Launcher, tmp_path: Path) -> None:
    job = run(launcher, tmp_path, "no_working_directory")
    assert job.returncode != 0
    assert "rank 1 has not come to it" in job.stderr, job.output
    (written,) = re.findall(r"This report is in (\S+)\.\n", job.stderr)
    Path(written).unlink()


def test_the_limit_holds_without_a_record(launcher: Launcher, tmp_path: Path) -> None:
    job = run(launcher, tmp_path, "no_record")
    assert job.returncode != 0
    assert "2 of 2 ranks on " in job.stderr
    assert "have no record in /dev/shm" in job.stderr
    assert re.search(r"StallError: rank 0 waited \d\.\d s .* no observer runs", job.stderr), (
        job.output
    )
    assert job.seconds < LIMIT + 5 + 6  # the ranks themselves wait 5 s longer than an observer


def test_a_late_rank_does_not_disturb_those_that_save(launcher: Launcher, tmp_path: Path) -> None:
    job = run(launcher, tmp_path, "late_and_saving", ranks=3, MPISTRAT_ON_STALL="raise")
    assert job.returncode != 0
    assert sorted(re.findall(r"rank (\d) saved", job.stdout)) == ["0", "1", "2"], job.output


def test_a_stall_is_raised_where_it_is(launcher: Launcher, tmp_path: Path) -> None:
    job = run(launcher, tmp_path, "of_one_pair", ranks=4, MPISTRAT_ON_STALL="raise")
    assert job.returncode != 0
    assert re.findall(r"rank (\d) caught", job.stdout) == ["0"], job.output
    assert sorted(re.findall(r"rank (\d) finished", job.stdout)) == ["2", "3"], job.output


def test_a_suspended_job_goes_on(launcher: Launcher, tmp_path: Path) -> None:
    job = run(launcher, tmp_path, "suspended")
    assert job.returncode == 0, job.output
    assert job.seconds > 2 * LIMIT
    assert "ranks have waited" not in job.stderr


def test_a_rank_at_its_end_that_another_waits_for(launcher: Launcher, tmp_path: Path) -> None:
    job = run(launcher, tmp_path, "ends_before_the_other_receives")
    assert job.returncode != 0  # the test's alarm
    assert re.search(r"rank 1 came to the end of the program \d s ago and waits", job.stderr), (
        job.output
    )
    here = line_of("ends_before_the_other_receives")
    assert f"observed.py:{here} in ends_before_the_other_receives" in job.stderr


@pytest.mark.parametrize("signal", ["SIGSTOP", pytest.param("SIGKILL", marks=pytest.mark.slow)])
def test_a_stall_without_an_observer(launcher: Launcher, tmp_path: Path, signal: str) -> None:
    """A rank reports in its place, once, as it would have done; and a stopped one does not stay."""
    job = run(launcher, tmp_path, "without_observer", signal, "stalls")
    assert job.returncode != 0
    assert job.stdout.count("held: []") == 1, job.output
    assert job.stderr.count("rank 1 has not come to it") == 1, job.output
    assert f"observed.py:{line_of('without_observer')} in without_observer" in job.stderr
    assert len(list(tmp_path.glob("mpistrat-report-*.txt"))) == 1
    assert job.seconds < LIMIT + 5 + 2 + 6


def test_a_stopped_observer_keeps_nobody(launcher: Launcher, tmp_path: Path) -> None:
    job = run(launcher, tmp_path, "without_observer", "SIGSTOP", "ends")
    assert job.returncode == 0, job.output
    assert job.stdout.count("finished") == 2
    assert job.seconds < 10


def test_a_rank_that_closes_all_files(launcher: Launcher, tmp_path: Path) -> None:
    """MPICH's launcher kills it at once; Open MPI would write about it for ever."""
    job = run(launcher, tmp_path, "closes_all_files")
    assert job.returncode != 0
    assert re.search(r"rank 1 of 2 \(.*\) .*os\.closerange", job.stderr), job.output
    assert not re.search(r"rank 0 of 2 \(.*\) (was killed|closed|has closed)", job.stderr)
    assert len(job.output) < 100_000
    assert "Traceback" not in job.stderr, job.output


@pytest.mark.parametrize("name", ["MPICH"])  # the launcher of Open MPI returns an error by itself
def test_a_job_inside_a_job_ends_alone(name: str, tmp_path: Path) -> None:
    """A workflow that runs under a launcher of its own goes on when a job that it started fails."""
    launcher = Launcher.named(name)
    inner = tmp_path / "inner.py"
    inner.write_text(
        "import os, numpy as np, mpistrat as ms\n"
        "strategy = ms.MultiWorkerMirroredStrategy()\n"
        "strategy.reduce('SUM', np.float32(1), axis=None)\n"
        "if strategy.extended.communicator.rank: os._exit(0)\n"
        "strategy.reduce('SUM', np.float32(1), axis=None)\n"
    )
    outer = tmp_path / "outer.py"
    outer.write_text(
        "import os, subprocess, sys\n"
        "own = ('PMI', 'HYD', 'MPI_', 'MPIR')\n"
        "env = {k: v for k, v in os.environ.items() if not k.startswith(own)}\n"
        f"job = ['mpiexec', '-n', '2', sys.executable, {str(inner)!r}]\n"
        "code = subprocess.run(job, env=env).returncode\n"
        "print('the workflow goes on', code, flush=True)\n"
    )
    command = launcher.command(1, [sys.executable, str(outer)])
    job = run_job(command, launcher.environment(), 60, tmp_path)
    code = re.search(r"the workflow goes on (-?\d+)", job.stdout)
    assert code, job.output
    assert int(code[1]) != 0
    assert job.returncode == 0


def test_ranks_of_a_job_have_a_name_in_common(launcher: Launcher, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os\n"
        "from mpistrat.liveness.processes import job_of\n"
        "print(job_of(os.getpid()) + '\\n', end='', flush=True)\n"
    )
    first, second = (launcher.run_python(3, program).stdout.split() for _ in range(2))
    assert len(first) == len(second) == 3
    assert len(set(first)) == len(set(second)) == 1
    assert set(first) != set(second)
