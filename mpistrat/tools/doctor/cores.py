"""Check whether ranks and threads have the cores that they need."""

from __future__ import annotations

import collections
import os
import re

from mpistrat.errors import counted
from mpistrat.liveness.processes import launcher_of
from mpistrat.machine.control_groups import allowed
from mpistrat.machine.cpu_share import cpu_share, intra_op_threads, users_threads
from mpistrat.machine.notices import runs_in_words
from mpistrat.machine.shared_caches import caches_of
from mpistrat.tools.doctor.facts import Cores, JobFacts, Ranks
from mpistrat.tools.doctor.finding import PROBLEM, Finding, Findings, findings_of, on_node

ok, warning, problem = findings_of("cores")
# Headings of docs/troubleshooting.md
_BOUND = "Ranks are bound to"
_TURNS = "Ranks take turns"
CPUS_PER_TASK = "SLURM_CPUS_PER_TASK"  # "8"
STEPS_CPUS_PER_TASK = "SRUN_CPUS_PER_TASK"  # srun reads this variable since Slurm 22.05


def look() -> Cores:
    cpus = os.sched_getaffinity(0)
    return Cores(
        allowed=sorted(cpus),
        of_launcher=_cores_of_launcher(),
        quota=allowed().cpus,
        threads=users_threads(),
        caches=list(caches_of(cpus)),
    )


def _cores_of_launcher() -> int:
    """Return how many cores the launcher may use on this node; the cores of this rank if no launcher is found.

    A small number means that a container or a batch system has limited the cores, and not a binding of ranks.
    """
    try:
        return len(os.sched_getaffinity(launcher_of(os.getpid()) or 0))
    except ProcessLookupError:  # the launcher has just ended
        return len(os.sched_getaffinity(0))


def check(job: JobFacts) -> Findings:
    if job.failure is not None and job.first.launch.of_several:
        return  # the number of ranks on this node is not known
    for name, ranks in job.nodes().items():
        found = [
            *_sharing(ranks),
            *_quota(ranks),
            *_threads(ranks),
            *_slurm(ranks),
        ]
        if PROBLEM not in {finding.level for finding in found}:
            found.append(_fine(ranks))
        if farthest := max(rank.cores.distance for rank in ranks):
            time = f"Two ranks hand each other 128 KB in {farthest * 1e6:.0f} us"
            found.append(ok(f"{time}{_shared_caches(ranks)}."))
        yield from on_node(name, found)


def _shared_caches(ranks: Ranks) -> str:
    caches = [set(rank.cores.caches) for rank in ranks]
    if not all(caches):
        return (
            "; the ranks are not bound, or the kernel does not know which caches their cores share"
        )
    shared = set.intersection(*caches)
    if not shared:
        return ": their cores share no cache"
    level = min(shared)[0]
    return f": their cores share a cache of level {level}"


def _sharing(ranks: Ranks) -> Findings:
    """Find, on one node, more ranks than cores, ranks that share cores while others are free, and cores that no rank
    may use. Yields at most one finding: the first of these faults.
    """
    first = ranks[0]
    own = len(first.cores.allowed)
    number = len(ranks)
    cores = _cores_of(ranks)
    num_cores = len(cores)
    usable = _usable_cpus(ranks)
    spare = 0  # cores that the launcher may use and no rank may
    if not first.launch.slurm:  # under Slurm, ranks cannot get more cores
        spare = max(0, first.cores.of_launcher - num_cores)
    of_launcher = num_cores + spare
    here = f"{counted(number, 'rank')} here"
    bound_to = counted(num_cores, "core")
    masks = [rank.cores.allowed for rank in ranks]
    # The masks of the ranks with a share of less than one core
    crowded = [mask for mask in masks if cpu_share(mask, masks) < 1]
    if crowded and num_cores >= number:
        shared = set().union(*crowded)
        shared_cores = counted(len(shared), "core")
        yield problem(
            f"{len(crowded)} of {here} are bound to {shared_cores} "
            f"(CPU {runs_in_words(shared)}), although the ranks have {num_cores} between them.",
            _bind(ranks, num_cores // number),
            _BOUND,
        )
    elif crowded and spare:
        yield problem(
            f"{here} are bound to {bound_to} (CPU {runs_in_words(cores)}) of the launcher's {of_launcher}.",
            _bind(ranks, of_launcher // number),
            _BOUND,
        )
    elif number > usable:
        limited = ""
        if usable < num_cores:
            limited = f", with {usable:g} CPUs' worth of time"
        most = max(1, int(usable))
        fix = f"start at most {counted(most, 'rank')} per node"
        if first.launch.slurm:
            fix += f", or ask Slurm for more: --ntasks-per-node={number} --cpus-per-task=1"
        yield problem(
            f"{here} have {bound_to}{limited}: they take turns, and MPI's waiting takes a core, too.",
            fix,
            _TURNS,
        )
    elif number > 1 and spare >= num_cores:
        yield warning(
            f"{here} may run on {num_cores} of the launcher's {of_launcher} cores: it has bound each to "
            f"{counted(own, 'core')}.",
            _bind(ranks, of_launcher // number),
            _BOUND,
        )


def _quota(ranks: Ranks) -> Findings:
    """Find a control group's limit of CPU time that is below the number of the ranks' cores.

    Nothing if the limit is below the number of ranks: `_sharing` reports that.
    """
    num_cores = len(_cores_of(ranks))
    usable = _usable_cpus(ranks)
    if len(ranks) <= usable < num_cores:
        share = max(1, int(usable / len(ranks)))
        yield warning(
            f"{counted(num_cores, 'core')} can be seen, but a control group allows {usable:g} CPUs' worth of time: "
            "more threads than that are stopped in turn.",
            f"set OMP_NUM_THREADS={share}, or raise the container's limit (--cpus)",
            _TURNS,
        )


def _cores_of(ranks: Ranks) -> set[int]:
    """Return the cores that any of the ranks may use."""
    return set().union(*(rank.cores.allowed for rank in ranks))


def _usable_cpus(ranks: Ranks) -> float:
    """Return the number of the ranks' cores; if that is less, the CPUs' worth of time that a control group allows."""
    cores = len(_cores_of(ranks))
    quota = ranks[0].cores.quota
    if quota is None:
        return cores
    return min(cores, quota)


def _threads(ranks: Ranks) -> Findings:
    """Find variables such as OMP_NUM_THREADS that the user has set to more than a rank's share of the cores."""
    masks = [rank.cores.allowed for rank in ranks]
    too_many = collections.Counter[tuple[str, str, int]]()
    for rank in ranks:
        share = intra_op_threads(rank.cores.allowed, masks)
        for name, text in rank.cores.threads.items():
            first = re.match(r"\d+", text)  # "4,2" for nested regions
            if first and int(first[0]) > share:
                too_many[name, text, share] += 1
    for (name, text, share), number in too_many.items():
        has = "has"
        each = ""
        if number > 1:
            has = "have"
            each = " each"
        of_ranks = f"{counted(number, 'rank')} of {len(ranks)}"
        yield problem(
            f"{name}={text}, but {of_ranks} here {has} {counted(share, 'core')}{each}: threads take turns.",
            f"unset {name} (mpistrat then takes each rank's share), or set {name}={share}",
            "Threads take turns",
        )


def _slurm(ranks: Ranks) -> Findings:
    """Find a --cpus-per-task that sbatch got and srun did not take over. Since Slurm 22.05, srun ignores sbatch's."""
    launch = ranks[0].launch
    slurm = launch.slurm
    has = len(ranks[0].cores.allowed)
    asked = slurm.get(CPUS_PER_TASK, "")
    by_srun = launch.by_srun and STEPS_CPUS_PER_TASK not in slurm
    if by_srun and asked.isdigit() and has < int(asked):
        yield warning(
            f"The job asked for {CPUS_PER_TASK}={asked}, but a rank may run on {counted(has, 'core')}: since Slurm "
            "22.05, srun does not take this number from sbatch.",
            f"srun --cpus-per-task=${CPUS_PER_TASK} …, or export {STEPS_CPUS_PER_TASK}=${CPUS_PER_TASK}",
            "srun does not take this number from sbatch",
        )


def _fine(ranks: Ranks) -> Finding:
    masks = [rank.cores.allowed for rank in ranks]
    shares = {intra_op_threads(mask, masks) for mask in masks}
    least_and_most = sorted({min(shares), max(shares)})
    cores = " to ".join(str(share) for share in least_and_most)
    threads: set[str] = set()
    for rank in ranks:
        threads.update(rank.cores.threads.values())
    how_many = "as many"
    if threads:
        how_many = ", ".join(["as you set them", *sorted(threads)])
    number = counted(len(ranks), "rank")
    if len(ranks) > 1:
        number += ", each"
    all_cores = counted(len(_cores_of(ranks)), "core")
    return ok(f"{number} with {cores} of {all_cores}; threads: {how_many}.")


def _bind(ranks: Ranks, each: int) -> str:
    """Return advice: the launcher's command line that gives each rank `each` cores of its own, at least one."""
    each = max(1, each)
    here = len(ranks)
    launch = ranks[0].launch
    if launch.launcher.startswith("Open MPI"):
        return f"mpirun --bind-to none …, or --map-by ppr:{here}:node:pe={each} --bind-to core"
    if launch.by_srun:
        return f"srun --ntasks-per-node={here} --cpus-per-task={each} --cpu-bind=cores …"
    if launch.launcher:
        return f"mpirun -bind-to none …, or -bind-to core:{each}"
    return f"start it without taskset, or give each rank {counted(each, 'core')}"
