"""Clocks, and what Slurm says."""

import dataclasses
from collections.abc import Callable

import pytest

from mpistrat.tools.doctor import nodes
from mpistrat.tools.doctor.facts import Clock, JobFacts
from mpistrat.tools.doctor.finding import OK, PROBLEM, WARNING

MakeJob = Callable[..., JobFacts]
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_DISTRIBUTION": "cyclic",
    "SLURMD_NODENAME": "n1",
    "SLURM_NTASKS": "4",
}


def with_clocks(job: JobFacts, *clocks: Clock) -> JobFacts:
    return dataclasses.replace(job, clocks=list(clocks))


def in_slurm(
    job: JobFacts, numbers: Callable[[int], int] = int, node: Callable[[int], int] | None = None
) -> JobFacts:
    """As srun starts it; `numbers` and `node` give each rank's SLURM_PROCID and SLURM_NODEID."""
    ranks = []
    for rank in job.ranks:
        slurm = {
            **STEP,
            "SLURM_PROCID": str(numbers(rank.rank)),
            "SLURM_NODEID": str(node(rank.rank) if node else rank.node),
        }
        launch = dataclasses.replace(rank.launch, slurm=slurm, launcher="srun", job_state="RUNNING")
        ranks.append(dataclasses.replace(rank, launch=launch))
    return JobFacts(ranks)


def test_clocks_that_agree(make_job: MakeJob) -> None:
    job = with_clocks(make_job(nodes=3), Clock(1, 0.002, 1e-5), Clock(2, -0.001, 1e-5))
    (finding,) = nodes.check(job)
    assert finding.level == OK
    assert "Clocks of 3 nodes differ by 2.000 ms at most" in finding.text


@pytest.mark.parametrize(
    ("ahead", "level", "way"), [(3.0, WARNING, "ahead of"), (-90.0, PROBLEM, "behind")]
)
def test_a_clock_that_is_wrong(make_job: MakeJob, ahead: float, level: str, way: str) -> None:
    job = with_clocks(make_job(nodes=3), Clock(1, 0.0, 1e-5), Clock(2, ahead, 1e-5))
    (finding,) = nodes.check(job)
    assert finding.level == level
    assert finding.text.startswith(f"The clock of n3 is {abs(ahead):.1f} s {way} that of n1")
    assert "chronyd" in finding.fix


def test_the_first_nodes_clock_is_wrong(make_job: MakeJob) -> None:
    """All others are 5 s ahead of it: said once, of it."""
    job = with_clocks(make_job(nodes=4), *(Clock(node, 5.0, 1e-5) for node in (1, 2, 3)))
    (finding,) = nodes.check(job)
    assert finding.text.startswith("The clock of n1 is 5.0 s behind that of the others")


@pytest.mark.parametrize(("ahead", "level"), [(5.0, WARNING), (-90.0, PROBLEM)])
def test_one_of_two_clocks_is_wrong(make_job: MakeJob, ahead: float, level: str) -> None:
    """Nobody knows which: none is blamed."""
    (finding,) = nodes.check(with_clocks(make_job(nodes=2), Clock(1, ahead, 1e-5)))
    assert finding.level == level
    assert finding.text.startswith(f"The clocks of n1 and n2 are {abs(ahead):.1f} s apart: ")
    assert "--exclude" not in finding.fix


def test_a_slow_round_trip_is_no_skew(make_job: MakeJob) -> None:
    (finding,) = nodes.check(with_clocks(make_job(nodes=2), Clock(1, 1.5, 1.0)))
    assert finding.level == OK


def test_a_step(make_job: MakeJob) -> None:
    (finding,) = nodes.check(in_slurm(make_job(nodes=2)))
    assert finding.level == OK
    assert "job 7, step 0, nodes n[1-2], tasks per node 2(x2), distribution cyclic" in finding.text


def test_ranks_in_another_order_than_slurms(make_job: MakeJob) -> None:
    (finding,) = nodes.check(in_slurm(make_job(nodes=2), numbers=lambda rank: 3 - rank))
    assert finding.level == WARNING
    assert "MPI numbers ranks 0-3 otherwise than Slurm does" in finding.text


def test_more_nodes_than_slurms(make_job: MakeJob) -> None:
    """A container for each rank: MPI sees nodes that cannot share memory."""
    (finding,) = nodes.check(in_slurm(make_job(nodes=4, per_node=1), node=lambda rank: rank // 2))
    assert finding.level == WARNING
    assert "on 2 nodes, and MPI sees 4 nodes" in finding.text


def test_variables_of_mpiruns_daemons(make_job: MakeJob) -> None:
    """Under mpirun in sbatch all ranks of a node inherit one number: nothing is compared."""
    job = in_slurm(make_job(nodes=2), numbers=lambda rank: rank // 2)
    assert [finding.level for finding in nodes.check(job)] == [OK]


@pytest.mark.parametrize("state", ["gone", "TIMEOUT", "CANCELLED"])
def test_variables_that_outlived_their_job(make_job: MakeJob, state: str) -> None:
    """PAINS 5: tmux, VS Code, ssh."""
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"}
    launch = {"slurm": slurm, "job_state": state, "variables": "", "size": None}
    (finding,) = nodes.check(make_job(per_node=1, launch=launch))
    assert finding.level == PROBLEM
    assert "speak of job 7" in finding.text
    assert "unset ${!SLURM_*}" in finding.fix


def test_a_tasks_variables_without_a_task(make_job: MakeJob) -> None:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}
    launch = {"slurm": slurm, "job_state": "RUNNING"}
    (finding,) = nodes.check(make_job(per_node=1, launch=launch))
    assert finding.level == WARNING
    assert "but not SLURMD_NODENAME" in finding.text


def test_an_allocations_shell(make_job: MakeJob) -> None:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}
    launch = {"slurm": slurm, "job_state": "RUNNING", "variables": "", "size": None}
    (finding,) = nodes.check(make_job(per_node=1, launch=launch))
    assert finding.level == WARNING
    assert "one process in job 7, which has 4 tasks" in finding.text
    assert finding.fix.startswith("start the ranks: srun mpistrat doctor")


def test_types_of_srun() -> None:
    new = (
        "MPI plugin types are...\n\tpmix\n\tnone\n\tcray_shasta\n\tpmi2\n"
        "specific pmix plugin versions available: pmix_v4\n"
    )
    old = "srun: MPI types are...\nsrun: none\nsrun: pmi2\nsrun: openmpi\n"
    assert nodes.types_of_srun(new) == ["pmix", "none", "cray_shasta", "pmi2"]
    assert nodes.types_of_srun(old) == ["none", "pmi2", "openmpi"]
    assert nodes.types_of_srun("srun: fatal: Could not establish a configuration source") == []
