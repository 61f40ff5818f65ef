"""Whether ranks and threads have the cores that they need."""

from __future__ import annotations

import collections
import os
import re
from collections.abc import Iterator, Sequence

from mpistrat.liveness.processes import launcher_of
from mpistrat.machine.control_groups import allowed
from mpistrat.machine.cpu_share import cpu_share, intra_op_threads, users_threads
from mpistrat.machine.notices import runs_in_words
from mpistrat.machine.shared_caches import caches_of
from mpistrat.tools.doctor.facts import Cores, Job, RankFacts
from mpistrat.tools.doctor.finding import PROBLEM, Finding, findings_of, on_node
from mpistrat.tools.doctor.wording import count

ok, warning, problem = findings_of("cores")
CPUS_PER_TASK = "SLURM_CPUS_PER_TASK"  # "8"
STEPS_CPUS_PER_TASK = "SRUN_CPUS_PER_TASK"  # since Slurm 22.05 srun looks at this one


def look() -> Cores:
    mine = os.sched_getaffinity(0)
    return Cores(
        allowed=sorted(mine),
        of_launcher=_cores_of_launcher(),
        quota=allowed().cpus,
        threads=users_threads(),
        caches=list(caches_of(mine)),
    )


def _cores_of_launcher() -> int:
    """How many cores the launcher may use: where a container or a batch system allows few, ranks are not bound."""
    try:
        return len(os.sched_getaffinity(launcher_of(os.getpid()) or 0))
    except ProcessLookupError:  # it has just ended
        return len(os.sched_getaffinity(0))


def check(job: Job) -> Iterator[Finding]:
    launch = job.first.launch
    if job.failure is not None and launch.variables and launch.size != 1:
        return  # how many ranks share this node is not known
    for name, ranks in job.nodes().items():
        found = [*_sharing(ranks), *_threads(ranks), *_slurm(ranks)]
        if not any(finding.level == PROBLEM for finding in found):
            found.append(_fine(ranks))
        if farthest := max(rank.cores.distance for rank in ranks):
            time = f"Two ranks hand each other 128 KB in {farthest * 1e6:.0f} us"
            found.append(ok(f"{time}{_shared_caches(ranks)}."))
        yield from on_node(name, found)


def _shared_caches(ranks: Sequence[RankFacts]) -> str:
    caches = [set(rank.cores.caches) for rank in ranks]
    if not all(caches):
        return (
            "; the ranks are not bound, or the kernel does not know which caches their cores share"
        )
    shared = set.intersection(*caches)
    return f": their cores share {f'a cache of level {min(shared)[0]}' if shared else 'no cache'}"


def _sharing(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """More ranks than cores, ranks bound to the same cores while others are free, or cores that no rank may use."""
    masks = [set(rank.cores.allowed) for rank in ranks]
    union = set().union(*masks)
    first, in_slurm = ranks[0].cores, ranks[0].launch.slurm
    quota, of_launcher = first.quota, first.of_launcher
    usable = len(union) if quota is None else min(len(union), quota)
    crowded = [mask for mask in masks if cpu_share(mask, masks) < 1]
    here = f"{count(len(ranks), 'rank')} here"
    if crowded and len(union) >= len(ranks):
        theirs = set().union(*crowded)
        yield problem(
            f"{len(crowded)} of {here} are bound to {count(len(theirs), 'core')} "
            f"(CPU {runs_in_words(theirs)}), although the ranks have {len(union)} between them.",
            _bind(ranks, len(union) // len(ranks)),
        )
    elif crowded and of_launcher > len(union) and not in_slurm:
        yield problem(
            f"{here} are bound to {count(len(union), 'core')} (CPU {runs_in_words(union)}) of the launcher's "
            f"{of_launcher}.",
            _bind(ranks, of_launcher // len(ranks)),
        )
    elif len(ranks) > usable:
        limited = f", with {quota:g} CPUs' worth of time" if quota and quota < len(union) else ""
        ask = f", or ask Slurm for more: --ntasks-per-node={len(ranks)} --cpus-per-task=1"
        yield problem(
            f"{here} have {count(len(union), 'core')}{limited}: they take turns, and MPI's waiting takes a core, too.",
            f"start at most {count(max(1, int(usable)), 'rank')} per node{ask if in_slurm else ''}",
        )
    elif len(ranks) > 1 and 2 * len(union) <= of_launcher and not in_slurm:
        yield warning(
            f"{here} may run on {len(union)} of the launcher's {of_launcher} cores: it has bound each to "
            f"{count(len(masks[0]), 'core')}.",
            _bind(ranks, of_launcher // len(ranks)),
        )
    if quota is not None and len(ranks) <= usable < len(union):
        yield warning(
            f"{count(len(union), 'core')} can be seen, but a control group allows {quota:g} CPUs' worth of time: more "
            "threads than that are stopped in turn.",
            f"set OMP_NUM_THREADS={max(1, int(quota / len(ranks)))}, or raise the container's limit (--cpus)",
        )


def _threads(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Threads that the user set, against each rank's share of the cores."""
    masks = [rank.cores.allowed for rank in ranks]
    too_many: collections.Counter[tuple[str, str, int]] = collections.Counter()
    for rank in ranks:
        share = intra_op_threads(rank.cores.allowed, masks)
        for name, text in rank.cores.threads.items():
            first = re.match(r"\d+", text)  # "4,2" for nested regions
            too_many[name, text, share] += bool(first and int(first[0]) > share)
    for (name, text, share), number in (+too_many).items():
        yield problem(
            f"{name}={text}, but {count(number, 'rank')} of {len(ranks)} here {'have' if number > 1 else 'has'} "
            f"{count(share, 'core')}{' each' * (number > 1)}: threads take turns.",
            f"unset {name} (mpistrat then takes each rank's share), or set {name}={share}",
        )


def _slurm(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """--cpus-per-task of sbatch does not reach srun since Slurm 22.05."""
    slurm, has = ranks[0].launch.slurm, len(ranks[0].cores.allowed)
    asked = slurm.get(CPUS_PER_TASK, "")
    by_srun = ranks[0].launch.by_srun and STEPS_CPUS_PER_TASK not in slurm
    if by_srun and asked.isdigit() and has < int(asked):
        yield warning(
            f"The job asked for {CPUS_PER_TASK}={asked}, but a rank may run on {count(has, 'core')}: since Slurm "
            "22.05, srun does not take that from sbatch.",
            f"srun --cpus-per-task=${CPUS_PER_TASK} …, or export {STEPS_CPUS_PER_TASK}=${CPUS_PER_TASK}",
        )


def _fine(ranks: Sequence[RankFacts]) -> Finding:
    masks = [rank.cores.allowed for rank in ranks]
    shares = sorted({intra_op_threads(mask, masks) for mask in masks})
    cores = f"{shares[0]}" if len(shares) == 1 else f"{shares[0]} to {shares[-1]}"
    threads = sorted({text for rank in ranks for text in rank.cores.threads.values()})
    how_many = f"as you set them, {', '.join(threads)}" if threads else "as many"
    union = set().union(*masks)
    return ok(
        f"{count(len(ranks), 'rank')}{', each' * (len(ranks) > 1)} with {cores} of {count(len(union), 'core')}; "
        f"threads: {how_many}."
    )


def _bind(ranks: Sequence[RankFacts], each: int) -> str:
    """What to tell the launcher so that each rank gets `each` cores of its own."""
    each, here = max(1, each), len(ranks)
    launcher = ranks[0].launch.launcher
    if launcher.startswith("Open MPI"):
        return f"mpirun --bind-to none …, or --map-by ppr:{here}:node:pe={each} --bind-to core"
    if ranks[0].launch.by_srun:
        return f"srun --ntasks-per-node={here} --cpus-per-task={each} --cpu-bind=cores …"
    if launcher:
        return f"mpirun -bind-to none …, or -bind-to core:{each}"
    return f"start it without taskset, or give each rank {count(each, 'core')}"
