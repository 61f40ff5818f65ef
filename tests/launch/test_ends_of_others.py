"""What is no rank's failure ends no job: children and steps of scripts, and errors that a program has caught."""

import re
import sys
from pathlib import Path

import pytest

from launch.fault_jobs import HOST_AND_PID
from support.harness.mpi_launcher import Job, Launcher

pytestmark = pytest.mark.waits

RANK = """
import os, subprocess, sys, time
rank = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
"""
# Rank 1 works on when all that may have disturbed it has happened.
GOES_ON = """
time.sleep(3 * rank)
print(f"rank {rank} has worked to its end", flush=True)
"""


def run(launcher: Launcher, folder: Path, program: str) -> Job:
    path = folder / "program.py"
    path.write_text(RANK + program)
    job = launcher.run_python(2, path, cwd=folder)
    assert job.left_behind == (), job.output
    return job


def assert_goes_on(job: Job) -> None:
    assert job.returncode == 0, job.output
    assert job.stdout.count("has worked to its end") == 2, job.output
    assert "mpistrat: " not in job.stderr


@pytest.mark.parametrize(
    "child", ["sys.exit(1)", "raise ValueError", "os._exit(1)", "os.kill(os.getpid(), 15)"]
)
def test_a_child_that_fails(launcher: Launcher, tmp_path: Path, child: str) -> None:
    """The only process of its rank that has imported mpistrat."""
    text = f"import os, sys, time, mpistrat; time.sleep(0 if {{rank}} else 2); {child}"  # rank 1's first
    program = f'subprocess.run([sys.executable, "-c", f"{text}"])\n'
    assert_goes_on(run(launcher, tmp_path, program + GOES_ON))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_that_is_terminated(launcher: Launcher, tmp_path: Path, method: str) -> None:
    program = f"""
import multiprocessing
def work(_):
    import mpistrat
    time.sleep(3 * rank)
if __name__ == "__main__":
    with multiprocessing.get_context("{method}").Pool(1) as pool:
        pool.map(work, range(1))
    print(f"rank {{rank}} has worked to its end", flush=True)
"""
    assert_goes_on(run(launcher, tmp_path, program))


SCRIPT = """
{python} step.py {then}
sleep 1
echo has worked to its end
"""


def run_script(launcher: Launcher, folder: Path, then: str) -> Job:
    """A step fails on rank 1."""
    (folder / "step.py").write_text(
        RANK + "import mpistrat\ntime.sleep(2 - rank)\nsys.exit(rank)\n"
    )
    (folder / "script.sh").write_text(SCRIPT.format(python=sys.executable, then=then))
    path = folder / "program.py"
    path.write_text("import os\nos.execvp('bash', ['bash', 'script.sh'])\n")
    job = launcher.run_python(2, path, cwd=folder)
    assert job.left_behind == (), job.output
    return job


def test_a_script_goes_on_after_a_step(launcher: Launcher, tmp_path: Path) -> None:
    assert_goes_on(run_script(launcher, tmp_path, "|| true"))


def test_a_script_ends_with_its_step(launcher: Launcher, tmp_path: Path) -> None:
    """The step is named; rank 0 is not left to work on."""
    job = run_script(launcher, tmp_path, "|| exit 1")
    assert job.returncode != 0
    named = rf"mpistrat: rank 1 of 2{HOST_AND_PID} ended with exit code 1"
    assert re.search(named, job.stderr), job.output


OF_A_PROGRAM = f"""
import mpistrat
try:
    1 / 0
except ZeroDivisionError:
    sys.excepthook(*sys.exc_info())
{GOES_ON}
"""


def test_an_error_that_was_caught(launcher: Launcher, tmp_path: Path) -> None:
    """A program may show its traceback as Python would."""
    job = run(launcher, tmp_path, OF_A_PROGRAM)
    assert_goes_on(job)
    assert job.stderr.count("ZeroDivisionError: division by zero") == 2


HOOK = """
from mpi4py import MPI
def hook(kind, error, trace):
    sys.__excepthook__(kind, error, trace)
    {end}
sys.excepthook = hook
import mpistrat
if rank:
    raise ValueError("wrong")
time.sleep(20)
"""


@pytest.mark.parametrize("end", ["MPI.COMM_WORLD.Abort(7)", "os._exit(7)", "sys.exit(7)", "pass"])
def test_a_hook_of_the_program_s_own(launcher: Launcher, tmp_path: Path, end: str) -> None:
    """The traceback is not lost where it ends the job by itself."""
    job = run(launcher, tmp_path, HOOK.format(end=end))
    assert job.returncode != 0
    assert job.seconds < 15, job.output
    assert job.stderr.count("ValueError: wrong\n") == 1, job.output
    who = rf"mpistrat: rank 1 of 2{HOST_AND_PID} failed; ending the job"
    assert re.search(who, job.stderr), job.output


def test_errors_at_a_prompt(launcher: Launcher, tmp_path: Path) -> None:
    """`python -i` shows them, and goes on until its input ends."""
    (tmp_path / "errors.py").write_text("import mpistrat\n1 / 0\n")
    program = """
os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
os.execv(sys.executable, [sys.executable, "-i", "errors.py"])
"""
    job = run(launcher, tmp_path, program)
    assert job.returncode == 0, job.output
    assert job.stderr.count("ZeroDivisionError") == 2
    assert "mpistrat: " not in job.stderr
