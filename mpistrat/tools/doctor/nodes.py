"""Check the nodes, their clocks, and Slurm's variables."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mpistrat.cluster_resolver import launcher
from mpistrat.cluster_resolver.slurm.job import slurm_variables
from mpistrat.errors import TopologyError, counted
from mpistrat.machine.notices import ranks_in_words
from mpistrat.tools.doctor.children import ChildOutput, ask
from mpistrat.tools.doctor.facts import Clock, JobFacts, Launch
from mpistrat.tools.doctor.finding import Finding, Findings, Level, findings_of
from mpistrat.trace.clocks import answer, compare_with

if TYPE_CHECKING:
    from mpi4py import MPI

ok, warning, problem = findings_of("nodes")
CLOCKS_DIFFER = 1.0  # seconds
CLOCKS_ARE_WRONG = 60.0  # seconds; MUNGE refuses credentials after 300
_STEP = {
    "step": "SLURM_STEP_ID",
    "nodes": "SLURM_STEP_NODELIST",
    "tasks per node": "SLURM_STEP_TASKS_PER_NODE",
    "distribution": "SLURM_DISTRIBUTION",
}
# Headings of docs/troubleshooting.md
_APART = "Clocks are apart"
_OTHERS = "SLURM_* variables speak of job"
UNSET = "begin with a new login shell, or unset them (bash: unset ${!SLURM_*})"
MISLEAD = "dates of files and logs mislead, and authentication (MUNGE, Kerberos) stops working"


def look() -> Launch:
    """Return the facts that this process knows of its launcher and of Slurm. Raises no error.

    If the launcher's variables contradict each other, the `Launch` has only Slurm's variables. Only a process that
    `speaks` (rank 0, or an unknown rank) asks mpirun, srun and squeue.
    """
    slurm = slurm_variables()
    launch = Launch(slurm=slurm)
    with contextlib.suppress(TopologyError):  # the start of MPI reports this error
        if claim := launcher.read_claim():
            size = None if claim.at_least else claim.size
            first = launcher.is_first_on_node()
            launch = Launch(size, claim.rank, claim.variables, claim.launcher, first, slurm)
    if launch.speaks:
        return dataclasses.replace(launch, **_commands(slurm))
    return launch


def _commands(slurm: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a `Launch` that come from commands: mpirun, srun and squeue, each for 10 s at most.

    Args: slurm: Slurm's variables; without them srun and squeue are not asked.
    """
    mpirun = shutil.which("mpirun") or shutil.which("mpiexec") or ""
    job = slurm.get("SLURM_JOB_ID", "")
    version = ask_tool(mpirun, "--version")  # no output if there is no mpirun
    types = ask_tool("srun", "--mpi=list") if slurm else ChildOutput("", "", "")
    return {
        "mpirun": mpirun,
        "mpirun_version": "\n".join(version.output.splitlines()[:3]),
        "srun_types": types_of_srun(types.output + types.errors),
        "job_state": _state(job) if job else "",
    }


def ask_tool(*command: str) -> ChildOutput:
    """Return the output of a command of the launcher's or of Slurm's, as `children.ask` does, after 10 s at most."""
    return ask(command, 10.0)


def types_of_srun(text: str) -> list[str]:
    """Return the MPI types in the output of `srun --mpi=list`: ["none", "pmi2"]; an empty list if it names none.

    The output is a heading and one type a line. Old versions put "srun: " before each line.
    """
    line = r"^(?:srun: )?[ \t]*(none|pmi\w*|cray\w*|openmpi)[ \t\r]*$"
    return re.findall(line, text, re.MULTILINE)


def _state(job: str) -> str:
    answer = ask_tool("squeue", "--noheader", "--jobs", job, "--format=%T")
    if answer.ended:
        return "gone" if "Invalid job id" in answer.errors else ""
    return answer.output.strip().split("\n")[0] or "gone"


def compare_clocks(leaders: MPI.Intracomm) -> list[Clock]:
    """Compare each node's time of day with node 0's, by the shortest of 20 round trips of a message.

    Called by: the first rank of each node. `leaders` has these ranks, in the order of the nodes.
    Returns: on node 0, a `Clock` for each other node; an empty list on the other nodes.
    """
    if leaders.rank:
        answer(leaders, 0, time.time_ns)
        return []
    clocks = []
    for node in range(1, leaders.size):
        found = compare_with(leaders, node, time.time_ns)
        clocks.append(Clock(node, found.ahead / 1e9, found.error / 1e9))
    return clocks


def check(job: JobFacts) -> Findings:
    yield from _clocks(job)
    if job.first.launch.slurm:
        found = [*_inherited(job), *_not_a_step(job), *_placement(job)]
        yield from found or [_slurm_summary(job)]


def _clocks(job: JobFacts) -> Findings:
    clocks = job.clocks
    if not clocks:
        return
    names = list(job.nodes())
    most = max(abs(clock.ahead) for clock in clocks)
    wrong = [clock for clock in clocks if abs(clock.ahead) - clock.error >= CLOCKS_DIFFER]
    if not wrong:
        yield ok(
            f"Clocks of {counted(len(names), 'node')} differ by {most * 1e3:.3f} ms at most "
            f"(give or take {max(clock.error for clock in clocks) * 1e3:.3f} ms)."
        )
    elif len(clocks) == 1:  # with two nodes, nothing tells whose clock is wrong
        yield _bad_clock(most)(
            f"The clocks of {names[0]} and {names[1]} are {most:.1f} s apart: {MISLEAD}.",
            "have the administrators look at chronyd on both (chronyc tracking tells which is wrong)",
            _APART,
        )
    elif len(wrong) > len(clocks) / 2:  # then node 0's clock is wrong
        ahead = sorted(clock.ahead for clock in wrong)
        median = ahead[len(wrong) // 2]
        yield _wrong_clock(names[0], -median, "the others")
    else:
        for clock in wrong:
            yield _wrong_clock(names[clock.node], clock.ahead, names[0])


def _wrong_clock(node: str, ahead: float, reference: str) -> Finding:
    relation = "ahead of" if ahead > 0 else "behind"
    return _bad_clock(abs(ahead))(
        f"The clock of {node} is {abs(ahead):.1f} s {relation} that of {reference}: {MISLEAD}.",
        f"have the administrators look at chronyd (chronyc tracking) on {node}, or leave it out: "
        f"srun --exclude={node}",
        _APART,
    )


def _bad_clock(seconds: float) -> Level:
    """Return the function `problem` or `warning`, by how many seconds two clocks are apart."""
    return problem if seconds >= CLOCKS_ARE_WRONG else warning


def _inherited(job: JobFacts) -> Findings:
    """Find Slurm variables of a job that this process does not belong to.

    They come from a terminal that outlived its job, or ssh copied them.
    """
    launch = job.first.launch
    number = launch.slurm.get("SLURM_JOB_ID", "")
    if launch.of_ended_job:
        state = f"it is {launch.job_state}"
        if launch.job_state == "gone":
            state = "Slurm does not know it any more"
        yield problem(
            f"SLURM_* variables speak of job {number}, but {state}: they were inherited, by a terminal (tmux, VS Code) "
            "that outlived its job, or by ssh.",
            UNSET,
            _OTHERS,
        )
    elif "SLURM_PROCID" in launch.slurm and "SLURMD_NODENAME" not in launch.slurm:
        yield warning(
            f"SLURM_PROCID={launch.slurm['SLURM_PROCID']} is set, but not SLURMD_NODENAME, which slurmd gives each "
            "task: these are another process's variables, and ssh or a terminal has copied them.",
            UNSET,
            _OTHERS,
        )


def _not_a_step(job: JobFacts) -> Findings:
    """Find a doctor that runs alone in a Slurm job of several tasks: in a shell of salloc or sbatch, or srun --pty."""
    launch = job.first.launch
    if job.failure is not None or len(job.ranks) > 1:
        return
    tasks = launch.slurm.get("SLURM_NTASKS", "")
    if tasks.isdigit() and int(tasks) > 1 and launch.job_state in ("", "RUNNING"):
        yield warning(
            f"This is one process in job {launch.slurm.get('SLURM_JOB_ID', '?')}, which has {tasks} tasks "
            f"(SLURM_NTASKS={tasks}): an allocation's shell, or a step of its own.",
            "start the ranks: srun mpistrat doctor, or mpirun mpistrat doctor",
            "This is one process in job",
        )


def _placement(job: JobFacts) -> Findings:
    """Find ranks that have another number in Slurm than in MPI, and a number of nodes that differs between the two.

    Nothing if MPI failed, or Slurm's numbers are not known.
    """
    numbers = _slurm_numbers(job)
    if job.failure or not numbers:
        return
    if moved := [rank for rank, number in numbers.items() if number != rank]:
        yield warning(
            f"MPI numbers {ranks_in_words(moved)} otherwise than Slurm does (SLURM_PROCID): programs that go by "
            "Slurm's numbers take other ranks' parts.",
            "use MPI's numbers (strategy.cluster_resolver.topology()), and unset MPICH_RANK_REORDER_METHOD",
            "MPI numbers ranks otherwise than Slurm does",
        )
    node_ids = {rank.launch.slurm.get("SLURM_NODEID", "") for rank in job.ranks}
    of_slurm = len(node_ids - {""})
    of_mpi = len(job.nodes())
    if of_slurm not in (0, of_mpi):
        yield warning(
            f"Slurm has put these ranks on {counted(of_slurm, 'node')}, and MPI sees {counted(of_mpi, 'node')}: some "
            "ranks of a node cannot share memory, or nodes are made up.",
            "look whether each rank has a container (a private /dev/shm or IPC namespace) or host name of its own: "
            "start one container per node, or share /dev/shm and the IPC namespace",
            "Slurm has put these ranks on",
        )


def _slurm_numbers(job: JobFacts) -> dict[int, int]:
    """Return Slurm's number (SLURM_PROCID) by MPI rank; an empty dict if a rank has no number, or two have the same.

    Two have the same under mpirun: Slurm numbers mpirun's daemons, and their ranks inherit the number.
    """
    numbers = {}
    for rank in job.ranks:
        text = rank.launch.slurm.get("SLURM_PROCID", "")
        if text.isdigit():
            numbers[rank.rank] = int(text)
    different = set(numbers.values())
    return numbers if len(different) == len(job.ranks) else {}


def _slurm_summary(job: JobFacts) -> Finding:
    launch = job.first.launch
    parts = [f"job {launch.slurm.get('SLURM_JOB_ID', '?')}"]
    if launch.by_srun:  # under mpirun, the step holds mpirun's daemons
        for what, name in _STEP.items():
            if text := launch.slurm.get(name):
                parts.append(f"{what} {text}")
    if launch.srun_types:
        parts.append(f"srun --mpi=list: {' '.join(launch.srun_types)}")
    return ok(f"Slurm: {', '.join(parts)}.")
