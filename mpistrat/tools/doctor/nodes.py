"""Nodes, their clocks, and what Slurm says of them."""

from __future__ import annotations

import dataclasses
import functools
import re
import socket
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpistrat.cluster_resolver.how_started import (
    claim_of_launcher,
    environment_of_others,
    first_on_node,
    slurm_variables,
)
from mpistrat.errors import TopologyError
from mpistrat.tools.doctor.children import ask
from mpistrat.tools.doctor.facts import Clock, Job, Launch
from mpistrat.tools.doctor.finding import OK, PROBLEM, WARNING, Finding
from mpistrat.tools.doctor.mpi_library import first_mpirun
from mpistrat.tools.doctor.wording import count, ranks_in_words
from mpistrat.trace.clocks import ROUNDS, compare

if TYPE_CHECKING:
    from mpi4py import MPI

CHECK = "nodes"
SECONDS_OF_A_COMMAND = 10.0
CLOCKS_DIFFER, CLOCKS_ARE_WRONG = 1.0, 60.0  # seconds; MUNGE refuses credentials after 300
MISLEAD = "dates of files and logs mislead, and authentication (MUNGE, Kerberos) ends to work"


def look() -> Launch:
    """Raises: nothing: what the launcher says may be nonsense."""
    try:
        claim = claim_of_launcher()
    except TopologyError:  # MPI's own start says so
        claim = None
    slurm = slurm_variables()
    launch = Launch(slurm=slurm, first_on_node=claim is None or first_on_node())
    if claim is not None:
        launch = dataclasses.replace(
            launch,
            size=None if claim.at_least else claim.size,
            rank=claim.rank,
            variables=claim.variables,
            launcher=claim.launcher,
        )
    if not launch.speaks:
        return launch
    others = environment_of_others()
    mpirun = first_mpirun()
    version = ask([mpirun, "--version"], SECONDS_OF_A_COMMAND, others).output if mpirun else ""
    types: list[str] = []
    state = ""
    if slurm:
        told = ask(["srun", "--mpi=list"], SECONDS_OF_A_COMMAND, others)
        types = types_of_srun(told.output + told.errors)
        if job := slurm.get("SLURM_JOB_ID", ""):
            state = _state(job, others)
    return dataclasses.replace(
        launch,
        mpirun=mpirun,
        mpirun_version="\n".join(version.splitlines()[:3]),
        srun_types=types,
        job_state=state,
    )


def host() -> str:
    return slurm_variables().get("SLURMD_NODENAME") or socket.gethostname()


def types_of_srun(text: str) -> list[str]:
    """Of `srun --mpi=list`: "MPI plugin types are...", then a name a line; older ones write "srun: " before each."""
    lines = [line.removeprefix("srun: ").strip() for line in text.splitlines()]
    return [line for line in lines if re.fullmatch(r"none|pmi\w*|cray\w*|openmpi", line)]


def _state(job: str, environment: dict[str, str]) -> str:
    told = ask(
        ["squeue", "--noheader", "--jobs", job, "--format=%T"], SECONDS_OF_A_COMMAND, environment
    )
    if told.ended:
        return "gone" if "Invalid job id" in told.errors else ""
    return told.output.strip().split("\n")[0] or "gone"


def compare_clocks(leaders: MPI.Intracomm) -> list[Clock]:
    """Each node's time of day beside node 0's, by the shortest of several round trips.

    Called by: the first rank of each node. Returns: on the first of them; an empty list on the others.
    """
    told = np.zeros(1, np.int64)
    if leaders.rank:
        for _ in range(ROUNDS):
            leaders.Recv(told, 0)
            told[0] = time.time_ns()
            leaders.Send(told, 0)
        return []

    def ask_node(node: int) -> int:
        leaders.Send(told, node)
        leaders.Recv(told, node)
        return int(told[0])

    clocks = []
    for node in range(1, leaders.size):
        found = compare(functools.partial(ask_node, node), time.time_ns)
        clocks.append(Clock(node, found.ahead / 1e9, found.error / 1e9))
    return clocks


def check(job: Job) -> Iterator[Finding]:
    yield from _clocks(job)
    if job.first.launch.slurm:
        found = [*_inherited(job), *_not_a_step(job), *_placement(job)]
        yield from found
        if not found:
            yield _slurm_summary(job)


def _clocks(job: Job) -> Iterator[Finding]:
    if not job.clocks:
        return
    names = job.node_names()
    wrong = [clock for clock in job.clocks if abs(clock.ahead) - clock.error >= CLOCKS_DIFFER]
    if wrong and len(job.clocks) == 1:
        yield _one_of_two(job.clocks[0], names)
        return
    if len(wrong) > len(job.clocks) / 2:  # then it is node 0's
        ahead = sorted(clock.ahead for clock in wrong)[len(wrong) // 2]
        wrong = [Clock(0, -ahead, max(clock.error for clock in wrong))]
        others = "the others"
    else:
        others = names[0]
    for clock in wrong:
        way = "ahead of" if clock.ahead > 0 else "behind"
        yield Finding(
            CHECK,
            _level(clock),
            f"The clock of {names[clock.node]} is {abs(clock.ahead):.1f} s {way} that of {others}: {MISLEAD}.",
            f"have the administrators look at chronyd (chronyc tracking) on {names[clock.node]}, or leave it out: "
            f"srun --exclude={names[clock.node]}",
        )
    if not wrong:
        most = max(abs(clock.ahead) for clock in job.clocks)
        error = max(clock.error for clock in job.clocks)
        yield Finding(
            CHECK,
            OK,
            f"Clocks of {count(len(job.clocks) + 1, 'node')} differ by {most * 1e3:.3f} ms at most "
            f"(give or take {error * 1e3:.3f} ms).",
        )


def _one_of_two(clock: Clock, names: Sequence[str]) -> Finding:
    """Which of them is wrong, no third tells."""
    return Finding(
        CHECK,
        _level(clock),
        f"The clocks of {names[0]} and {names[1]} are {abs(clock.ahead):.1f} s apart: {MISLEAD}.",
        "have the administrators look at chronyd on both (chronyc tracking tells which is wrong)",
    )


def _level(clock: Clock) -> str:
    return PROBLEM if abs(clock.ahead) >= CLOCKS_ARE_WRONG else WARNING


def _inherited(job: Job) -> Iterator[Finding]:
    """Variables of a job to which this process does not belong: a terminal outlived it, or ssh took them along."""
    launch = job.first.launch
    number = launch.slurm.get("SLURM_JOB_ID", "")
    if launch.of_ended_job:
        gone = (
            "Slurm does not know it any more"
            if launch.job_state == "gone"
            else f"it is {launch.job_state}"
        )
        yield Finding(
            CHECK,
            PROBLEM,
            f"SLURM_* variables speak of job {number}, but {gone}: they were inherited, by a terminal (tmux, VS Code) "
            "that outlived its job, or by ssh.",
            "begin with a new login shell, or unset them (bash: unset ${!SLURM_*})",
        )
    elif "SLURM_PROCID" in launch.slurm and "SLURMD_NODENAME" not in launch.slurm:
        yield Finding(
            CHECK,
            WARNING,
            f"SLURM_PROCID={launch.slurm['SLURM_PROCID']} is set, but not SLURMD_NODENAME, which slurmd gives each "
            "task: variables of another process, taken along by ssh or a terminal.",
            "begin with a new login shell, or unset them (bash: unset ${!SLURM_*})",
        )


def _not_a_step(job: Job) -> Iterator[Finding]:
    """In an allocation, and not one of its tasks: a shell of salloc or sbatch, or srun --pty."""
    launch = job.first.launch
    if job.failure is not None or len(job.ranks) > 1:
        return
    tasks = launch.slurm.get("SLURM_NTASKS", "")
    if tasks.isdigit() and int(tasks) > 1 and launch.job_state in ("", "RUNNING"):
        yield Finding(
            CHECK,
            WARNING,
            f"This is one process in job {launch.slurm.get('SLURM_JOB_ID', '?')}, which has {tasks} tasks "
            f"(SLURM_NTASKS={tasks}): an allocation's shell, or a step of its own.",
            "start the ranks: srun mpistrat doctor, or mpirun mpistrat doctor",
        )


def _placement(job: Job) -> Iterator[Finding]:
    """Slurm's numbers of tasks and nodes against MPI's."""
    if job.failure is not None:
        return
    places = [
        (rank, rank.launch.slurm.get("SLURM_PROCID", ""), rank.launch.slurm.get("SLURM_NODEID", ""))
        for rank in job.ranks
    ]
    numbers = [number for _, number, _ in places]
    if len(set(numbers)) < len(numbers) or not all(number.isdigit() for number in numbers):
        return  # under mpirun they tell of mpirun's daemons
    moved = [rank.rank for rank, number, _ in places if int(number) != rank.rank]
    if moved:
        yield Finding(
            CHECK,
            WARNING,
            f"MPI numbers {ranks_in_words(moved)} otherwise than Slurm does (SLURM_PROCID): programs that go by "
            "Slurm's numbers take other ranks' parts.",
            "go by MPI's (strategy.cluster_resolver.topology()), and unset MPICH_RANK_REORDER_METHOD",
        )
    slurm_nodes = {node for _, _, node in places if node}
    if slurm_nodes and len(slurm_nodes) != len(job.nodes()):
        yield Finding(
            CHECK,
            WARNING,
            f"Slurm has put these ranks on {count(len(slurm_nodes), 'node')}, and MPI sees "
            f"{count(len(job.nodes()), 'node')}: ranks of a node that cannot share memory, or made-up nodes.",
            "look whether each rank has a container (a private /dev/shm or IPC namespace) or host name of its own: "
            "start one container per node, or share /dev/shm and the IPC namespace",
        )


def _slurm_summary(job: Job) -> Finding:
    launch = job.first.launch
    parts = [f"job {launch.slurm.get('SLURM_JOB_ID', '?')}"]
    if launch.by_srun:  # else the step is that of mpirun's daemons
        for name, told in (
            ("SLURM_STEP_ID", "step {}"),
            ("SLURM_STEP_NODELIST", "nodes {}"),
            ("SLURM_STEP_TASKS_PER_NODE", "tasks per node {}"),
            ("SLURM_DISTRIBUTION", "distribution {}"),
        ):
            if value := launch.slurm.get(name):
                parts.append(told.format(value))
    if launch.srun_types:
        parts.append(f"srun --mpi=list: {' '.join(launch.srun_types)}")
    return Finding(CHECK, OK, f"Slurm: {', '.join(parts)}.")
