"""Ranks and threads against cores: the traps of binding (PAINS: oversubscription and affinity)."""

import dataclasses
import os
import subprocess
from collections.abc import Callable

import pytest

from mpistrat.tools.doctor import cores
from mpistrat.tools.doctor.facts import JobFacts, JobFailure
from mpistrat.tools.doctor.finding import OK, PROBLEM, WARNING

MakeJob = Callable[..., JobFacts]


def test_a_core_for_each(make_job: MakeJob) -> None:
    (finding,) = cores.check(make_job())
    assert (finding.level, finding.nodes) == (OK, ("n1",))
    assert finding.text == "2 ranks, each with 8 of 16 cores; threads: as many."


def test_all_bound_to_one_core(make_job: MakeJob) -> None:
    """As some launchers do with each of several jobs on a node: all begin at its first core."""
    job = make_job(per_node=4, cores={"allowed": [0], "of_launcher": 64})
    (finding,) = cores.check(job)
    assert finding.level == PROBLEM
    assert finding.text == "4 ranks here are bound to 1 core (CPU 0) of the launcher's 64."
    assert "-bind-to core:16" in finding.fix


def test_some_bound_to_the_same_core(make_job: MakeJob) -> None:
    job = make_job(per_node=3)
    first, second, third = job.ranks
    third = dataclasses.replace(third, cores=second.cores)
    one_core = dataclasses.replace(second.cores, allowed=[8])
    job = JobFacts(
        [first, *(dataclasses.replace(rank, cores=one_core) for rank in (second, third))]
    )
    (finding,) = cores.check(job)
    assert finding.level == PROBLEM
    assert finding.text.startswith("2 of 3 ranks here are bound to 1 core (CPU 8), although")


@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        ("Open MPI's mpiexec", "--map-by ppr:4:node:pe=16"),
        ("Open MPI's mpiexec", "--bind-to none"),
        ("the mpiexec of MPICH", "-bind-to none"),
    ],
)
def test_a_launcher_that_binds_each_rank_to_one_core(
    make_job: MakeJob, launcher: str, words: str
) -> None:
    """Open MPI's default for two ranks: 62 of 64 cores idle."""
    job = make_job(per_node=4, launch={"launcher": launcher})
    ranks = [
        dataclasses.replace(
            rank, cores=dataclasses.replace(rank.cores, allowed=[rank.rank], of_launcher=64)
        )
        for rank in job.ranks
    ]
    (warning, fine) = cores.check(JobFacts(ranks))
    assert warning.level == WARNING
    assert "4 ranks here may run on 4 of the launcher's 64 cores" in warning.text
    assert words in warning.fix
    assert fine.level == OK


def test_more_ranks_than_cores(make_job: MakeJob) -> None:
    job = make_job(per_node=4, cores={"allowed": [0, 1], "of_launcher": 2})
    (finding,) = cores.check(job)
    assert finding.level == PROBLEM
    assert "4 ranks here have 2 cores" in finding.text
    assert finding.fix == "start at most 2 ranks per node"


def test_an_allotment_of_slurm_is_no_binding(make_job: MakeJob) -> None:
    """2 of the launcher's 64 cores are the job's: more is to be had from Slurm only."""
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    launch = {"slurm": slurm, "launcher": "srun"}
    alloted = {"allowed": [4, 5], "of_launcher": 64}
    assert [f.level for f in cores.check(make_job(cores=alloted, launch=launch))] == [OK]
    (finding,) = cores.check(make_job(per_node=4, cores=alloted, launch=launch))
    assert "--ntasks-per-node=4" in finding.fix


def test_a_container_of_a_few_cores_is_no_binding(make_job: MakeJob) -> None:
    """docker --cpuset-cpus, Kubernetes, PBS, LSF: what starts the ranks may use no others, either."""
    allowed = {"allowed": [4, 5, 6, 7], "of_launcher": 4}
    (fine,) = cores.check(make_job(cores=allowed))
    assert (fine.level, fine.text) == (OK, "2 ranks, each with 2 of 4 cores; threads: as many.")


def test_cores_that_the_launcher_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    core = min(os.sched_getaffinity(0))
    launcher = subprocess.Popen(["sleep", "60"])
    os.sched_setaffinity(launcher.pid, [core])
    monkeypatch.setattr(cores, "launcher_of", lambda pid: launcher.pid)
    try:
        assert cores.look().of_launcher == 1
    finally:
        launcher.kill()
        launcher.wait()
    here = cores.look()  # it has ended
    assert here.of_launcher == len(here.allowed)


def test_too_many_threads(make_job: MakeJob) -> None:
    (finding,) = cores.check(make_job(cores={"threads": {"OMP_NUM_THREADS": "64,2"}}))
    assert finding.level == PROBLEM
    assert finding.text.startswith("OMP_NUM_THREADS=64,2, but 2 ranks of 2 here have 8 cores each")
    assert "set OMP_NUM_THREADS=8" in finding.fix


def test_as_many_threads_as_cores(make_job: MakeJob) -> None:
    (finding,) = cores.check(make_job(cores={"threads": {"OMP_NUM_THREADS": "8"}}))
    assert finding.level == OK
    assert "as you set them, 8" in finding.text


def test_a_container_that_shows_all_cores_and_allows_two(make_job: MakeJob) -> None:
    (warning, _) = cores.check(make_job(cores={"quota": 2.0}))
    assert warning.level == WARNING
    assert "a control group allows 2 CPUs' worth of time" in warning.text
    assert "OMP_NUM_THREADS=1" in warning.fix
    problems = list(cores.check(make_job(per_node=4, cores={"quota": 2.0})))
    assert [f.level for f in problems] == [PROBLEM]


def test_cpus_per_task_that_srun_does_not_take_from_sbatch(make_job: MakeJob) -> None:
    slurm = {"SLURM_STEP_ID": "0", "SLURM_CPUS_PER_TASK": "16"}
    launch = {"slurm": slurm, "launcher": "srun"}
    (warning, _) = cores.check(make_job(launch=launch))
    assert warning.level == WARNING
    assert "SLURM_CPUS_PER_TASK=16" in warning.text
    assert "--cpus-per-task=$SLURM_CPUS_PER_TASK" in warning.fix
    slurm["SRUN_CPUS_PER_TASK"] = "16"
    assert [f.level for f in cores.check(make_job(launch=launch))] == [OK]


def test_ranks_that_cannot_be_counted(make_job: MakeJob) -> None:
    """MPI did not start: how many ranks share the node is not known, and nothing is said."""
    job = make_job()
    failed = JobFacts(job.ranks[:1], JobFailure("MPI_Init", "topology", "..."))
    assert list(cores.check(failed)) == []


def test_this_machine() -> None:
    here = cores.look()
    assert 1 <= len(here.allowed) <= here.of_launcher
