"""The pages of docs/tutorial, done from top to bottom as their reader does: each output is the one that they show."""

import contextlib
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from support import console
from support.clusters.slurm_cluster import SlurmCluster
from support.console import Command, SavedFile
from support.documentation import TOP
from support.harness.mpi_launcher import Job, Launcher, run_job

*AT_THE_KEYBOARD, IN_SLURM = sorted((TOP / "docs" / "tutorial").glob("[0-9]_*.md"))
FAILING = {"2_look_at_a_run": 1, "4_three_mistakes": 2, "5_kill_it_and_go_on": 1}  # commands
MOST_LINES = 12  # of an answer to a mistake
SECONDS_OF_TORCHRUN = 60  # gloo sometimes hangs at its end

Environment = Mapping[str, str]
Programs = Callable[[Path, Environment], AbstractContextManager[Environment]]


@pytest.fixture(params=["forked", pytest.param("as they are", marks=pytest.mark.slow)])
def programs(request: pytest.FixtureRequest) -> Programs:
    """Makes an environment whose programs need not import torch, or leaves it as it is."""
    if request.param == "forked":
        return console.forked_programs
    return lambda folder, environment: contextlib.nullcontext(environment)


def of_a_reader(environment: Environment) -> dict[str, str]:
    """With the commands of this Python's environment; nothing says how many threads a rank has."""
    path = f"{Path(sys.executable).parent}:{environment['PATH']}"
    others = {name: value for name, value in environment.items() if name != "OMP_NUM_THREADS"}
    return {**others, "PATH": path}


@pytest.mark.long("five pages with twelve jobs")
def test_the_pages_at_the_keyboard(programs: Programs, tmp_path: Path) -> None:
    bin_folder, folder = tmp_path / "bin", tmp_path / "tutorial"
    bin_folder.mkdir()
    folder.mkdir()
    environment = of_a_reader(Launcher.named("MPICH").environment())
    with programs(bin_folder, environment) as environment:
        for page in AT_THE_KEYBOARD:
            jobs = console.run(page, folder, environment)
            failed = [job for job in jobs if job.returncode]
            assert len(failed) == FAILING.get(page.stem, 0), page.stem
            if page.stem == "4_three_mistakes":
                assert max(map(lines_of_the_answer, failed)) <= MOST_LINES
    assert (folder / "traces" / "timeline.png").stat().st_size > 10_000


def lines_of_the_answer(job: Job) -> int:
    """Lines of mpistrat's: not those of Python's traceback, nor of MPI."""
    answer = job.stderr[job.stderr.index("mpistrat: rank ") :]
    answer = re.sub(r"^Traceback .*\n(?: .*\n)+", "", answer, flags=re.MULTILINE)
    return len([line for line in answer.splitlines() if line and not line.startswith("Abort(")])


def make_programs(folder: Path) -> None:
    """The files of the pages at the keyboard, and those that `patch` makes of them."""
    for step in (step for page in AT_THE_KEYBOARD for step in console.steps(page.read_text())):
        if isinstance(step, SavedFile):
            (folder / step.name).write_text(step.text)
        elif step.text.startswith("patch "):
            subprocess.run(shlex.split(step.text), cwd=folder, check=True, timeout=10)


@pytest.mark.slow
def test_torchrun_prints_the_same_losses(tmp_path: Path) -> None:
    """Its return code is not looked at: torch's gloo sometimes dies after the last line."""
    page = AT_THE_KEYBOARD[0].read_text(encoding="utf-8")
    (program,) = (step for step in console.steps(page) if isinstance(step, SavedFile))
    (shown,) = (step for step in console.steps(page) if isinstance(step, Command))
    (command,) = re.findall(r"`(torchrun .*)` prints the same losses", page)
    (tmp_path / program.name).write_text(program.text, encoding="utf-8")
    environment = of_a_reader(Launcher.named("MPICH").environment())
    try:
        printed = run_job(shlex.split(command), environment, SECONDS_OF_TORCHRUN, tmp_path).stdout
    except subprocess.TimeoutExpired as late:
        printed = str(late.stdout)
    losses = [line for line in shown.output.splitlines() if line.startswith("epoch")]
    assert printed.splitlines() == losses


@pytest.mark.slurm
@pytest.mark.long(
    "Slurm holds a requeued job for a while, and starts each job seconds after the last."
)
def test_the_page_on_slurm(slurm: SlurmCluster, programs: Programs, tmp_path: Path) -> None:
    bin_folder, folder = tmp_path / "bin", tmp_path / "tutorial"
    bin_folder.mkdir()
    folder.mkdir()
    make_programs(folder)
    # What a site and page 1 give the job script.
    (bin_folder / "module").write_text("#!/bin/sh\n")
    (bin_folder / "module").chmod(0o755)
    (tmp_path / "hour" / "bin").mkdir(parents=True)
    (tmp_path / "hour" / "bin" / "activate").touch()
    environment = of_a_reader(slurm.environment(Launcher.named("MPICH")))
    environment |= {"HOME": str(tmp_path), "PATH": f"{bin_folder}:{environment['PATH']}"}
    with programs(bin_folder, environment) as environment:
        jobs = console.run(IN_SLURM, folder, environment)
    assert [job for job in jobs if job.returncode] == []
