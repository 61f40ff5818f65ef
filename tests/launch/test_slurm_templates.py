"""The scripts in slurm/: Slurm accepts each as it is, and they start what they say."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.clusters.slurm_cluster import BatchJob, SlurmCluster
from support.documentation import blocks_of
from support.harness.mpi_launcher import Launcher

pytestmark = [
    pytest.mark.both_mpis("launching"),
    pytest.mark.slurm,
]

TOP = Path(__file__).parents[2]
LAYOUT = Path(__file__).parent / "programs" / "layout.py"
REQUEUED = Path(__file__).parent / "programs" / "requeued.py"
TEMPLATES = sorted(path.name for path in (TOP / "slurm").glob("*.sbatch"))
ENV = {"MPISTRAT_START_SECONDS": "60"}


@pytest.fixture
def mpich() -> Launcher:
    return Launcher.named("MPICH")


def template(name: str) -> Path:
    return TOP / "slurm" / name


@pytest.mark.parametrize("name", TEMPLATES)
def test_slurm_accepts_it(slurm: SlurmCluster, mpich: Launcher, name: str) -> None:
    command = ["sbatch", "--test-only", str(template(name)), "train.py"]
    end = time.monotonic() + 30
    while True:  # a Slurm that has just started does not have all nodes to give
        checked = subprocess.run(
            command, env=slurm.environment(mpich), capture_output=True, text=True, timeout=60
        )
        if checked.returncode == 0 or time.monotonic() > end:
            break
        time.sleep(0.5)
    assert checked.returncode == 0, checked.stderr
    assert re.search(r"to start at .* on (nodes? )?n", checked.stderr), checked.stderr


def fewer_ranks(name: str, folder: Path) -> Path:
    """The script, with 2 ranks where it has 4 and with 2 where it has 8: two cores run the tests."""
    text = template(name).read_text()
    smaller, count = re.subn(r"(?m)^(#SBATCH --ntasks-per-node=)[48]$", r"\g<1>2", text)
    assert count == 1
    path = folder / name
    path.write_text(smaller)
    return path


@pytest.mark.parametrize(
    ("name", "jobs", "nodes", "gpus"),
    [
        ("one-rank-per-gpu.sbatch", {"worker": 4}, [0, 0, 1, 1], "0,1,2,3"),
        ("several-ranks-per-gpu.sbatch", {"worker": 2}, [0, 0], "0,1,2,3"),
        (
            "parameter-server.sbatch",
            {"chief": 1, "ps": 2, "worker": 4},
            [0, 0, 1, 2, 2, 3, 3],
            "0,1,2,3",
        ),
        ("tpu.sbatch", {"worker": 4}, [0, 1, 2, 3], None),
    ],
)
def test_ranks_and_what_they_see(
    slurm: SlurmCluster,
    mpich: Launcher,
    tmp_path: Path,
    name: str,
    jobs: dict[str, int],
    nodes: list[int],
    gpus: str | None,
) -> None:
    script = template(name) if name == "tpu.sbatch" else fewer_ranks(name, tmp_path)
    arguments = [f"{kind}={tasks}" for kind, tasks in jobs.items()]
    job = slurm.sbatch(mpich, script, arguments=[LAYOUT, *arguments], env=ENV, cwd=tmp_path)
    assert job.wait() == "COMPLETED", job.report()
    ranks = [json.loads(line) for line in job.output.splitlines() if line.startswith("{")]
    ranks.sort(key=lambda line: line["mpi"][0])
    assert [line["mpi"][2] for line in ranks] == [nodes] * len(nodes), job.report()
    assert [line["slurm"] for line in ranks] == [line["mpi"] for line in ranks]
    tasks = [[kind, number] for kind, count in jobs.items() for number in range(count)]
    assert [line["task"] for line in ranks] == tasks
    if "ps" in jobs:  # as a strategy without arguments has them
        assert [line["role"] for line in ranks] == tasks
    no_gpus = len(tasks) - jobs["worker"]
    assert {line["gpus"] for line in ranks[no_gpus:]} == {gpus}
    assert {line["gpus"] for line in ranks[:no_gpus]} <= {None}


def test_training_on_cpus(slurm: SlurmCluster, mpich: Launcher, tmp_path: Path) -> None:
    program = [TOP / "scripts" / "train_text.py", "--steps=4", "--every=4"]
    options = ("--ntasks-per-node=1", "--cpus-per-task=1")
    job = slurm.sbatch(
        mpich, template("cpu.sbatch"), *options, arguments=program, env=ENV, cwd=tmp_path
    )
    assert job.wait(150) == "COMPLETED", job.report()
    assert "step    4/4 " in job.output, job.report()


@pytest.mark.long("Slurm starts the trials of an array one after another, seconds apart.")
def test_trials(slurm: SlurmCluster, mpich: Launcher, tmp_path: Path) -> None:
    program = [TOP / "scripts" / "train_digits.py", "--epochs=1"]
    options = ("--array=1,5", "--ntasks-per-node=1", f"--output={tmp_path}/%a.out")
    job = slurm.sbatch(
        mpich, template("trials.sbatch"), *options, arguments=program, env=ENV, cwd=tmp_path
    )
    end = time.monotonic() + 150
    while slurm.run("squeue", "--noheader", "--jobs", job.id) and time.monotonic() < end:
        time.sleep(0.3)
    for trial, means in ((1, "--lr 3e-3 --seed 0"), (5, "--lr 1e-2 --seed 1")):
        output = (tmp_path / f"{trial}.out").read_text(
            errors="replace"
        )  # of a progress bar cut off
        assert f"trial {trial}: {means}" in output
        assert "Test accuracy" in output  # of one epoch: too low for an exit code of 0
    pictures = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.png"))
    assert pictures == [f"trial-{job.id}-{trial}/learning_curve.png" for trial in (1, 5)]


def test_a_job_that_is_told_to_end_goes_on_later(
    slurm: SlurmCluster, launcher: Launcher, tmp_path: Path
) -> None:
    script = tmp_path / "requeue.sbatch"
    text = template("requeue.sbatch").read_text()
    if launcher.name == "Open MPI":
        text, count = re.subn(r"(?m)^launch=\(srun [^)]*\)", "launch=(mpirun)", text)
        assert count == 1
        text = text.replace('python "$@"', f'{sys.executable} "$@"')  # not that of mpirun's folder
    script.write_text(text)
    job = slurm.sbatch(
        launcher, script, "--ntasks-per-node=1", arguments=[REQUEUED], env=ENV, cwd=tmp_path
    )
    wait_for_output(job, "rank 1 counts 0")
    slurm.run("scancel", "--batch", "--signal=USR1", job.id)
    wait_for_output(job, "back into the queue")
    assert job.wait() == "COMPLETED", job.report()
    assert job.facts()["Restarts"] == "1"
    assert sorted(re.findall(r"rank \d heard \d", job.output)) == [
        "rank 0 heard 1",
        "rank 1 heard 1",
    ]
    counted = re.findall(r"rank 1 counts (\d)", job.output)
    assert counted == [str(count) for count in range(10)], job.report()


@pytest.mark.parametrize(
    ("variables", "requeued"),
    [
        ({}, "1234"),
        ({"SLURM_ARRAY_JOB_ID": "1234", "SLURM_ARRAY_TASK_ID": "3"}, "1234_3"),
    ],
)
def test_what_is_requeued(tmp_path: Path, variables: dict[str, str], requeued: str) -> None:
    """The last task of a job array has the array's number, which means all tasks."""
    done = run_beside_stand_ins(tmp_path, template("requeue.sbatch"), variables)
    assert f"job {requeued} is not finished" in done.stdout
    assert (tmp_path / "asked").read_text() == f"requeue {requeued}\n"


def test_the_script_of_the_page_requeues(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(blocks_of("docs/preemption.md")[1].text)
    run_beside_stand_ins(tmp_path, script, {})
    assert (tmp_path / "asked").read_text() == "requeue 1234\n"


def run_beside_stand_ins(
    folder: Path, script: Path, variables: dict[str, str]
) -> "subprocess.CompletedProcess[str]":
    """Run a batch script beside an `srun` whose program leaves with 42, and a `scontrol` that writes to `folder`."""
    for name, text in (("srun", "exit 42"), ("scontrol", f'echo "$*" > {folder}/asked')):
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    env = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "1234"}
    done = subprocess.run(
        ["bash", script, "train.py"],
        env={**env, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 42, done.stderr
    return done


@pytest.mark.slow
@pytest.mark.time_limit(300)
def test_training_that_slurm_requeues_goes_on_from_its_checkpoint(
    slurm: SlurmCluster, mpich: Launcher, tmp_path: Path
) -> None:
    """train_text.py handles no signal, and begins again at its last checkpoint."""
    program = [TOP / "scripts" / "train_text.py", "--steps=60", "--every=10"]
    options = ("--ntasks-per-node=1", "--cpus-per-task=1")
    job = slurm.sbatch(
        mpich, template("requeue.sbatch"), *options, arguments=program, env=ENV, cwd=tmp_path
    )
    wait_for_output(job, "step   20/60")  # the checkpoint of step 10 is written by then
    slurm.run("scontrol", "requeue", job.id)
    assert job.wait(150) == "COMPLETED", job.report()
    assert re.search(r"step +[1-6]0/60  resumed", job.output), job.report()  # MPICH catches SIGTERM
    assert "step   60/60" in job.output


def wait_for_output(job: BatchJob, text: str, seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while text not in job.output:
        assert time.monotonic() < end, job.report()
        time.sleep(0.1)
