"""Gives each rank its task (chief, worker or parameter server), by nodes, a cluster, or a heterogeneous Slurm job."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from mpistrat.cluster_resolver import task_roles
from mpistrat.cluster_resolver.cluster_resolver import ClusterResolver
from mpistrat.cluster_resolver.cluster_spec import ClusterSpec
from mpistrat.cluster_resolver.mpi import MPIClusterResolver
from mpistrat.cluster_resolver.roles import task_claims
from mpistrat.cluster_resolver.slurm.resolver import own_component
from mpistrat.cluster_resolver.tf_config import TF_CONFIG, TFConfigClusterResolver
from mpistrat.errors import TopologyError
from mpistrat.options import is_integer
from mpistrat.settings import Environment
from mpistrat.topology import Topology


@dataclass(frozen=True)
class JobRoles:
    """The task (a type and an id) of each rank of a communicator. Equal on all ranks except for `rank`.

    Attributes:
        rank: this process's rank.
        ranks: the ranks of each task type, by task id: {"chief": (0,), "worker": (1, 2), "ps": (3,)}. Types without
            tasks are absent.
        cluster_spec: the tasks' addresses, or the names of their nodes. Nobody connects to an address, because MPI
            moves the bytes.
    """

    rank: int
    ranks: Mapping[str, tuple[int, ...]]
    cluster_spec: ClusterSpec

    @property
    def task_type(self) -> str:
        return next(job for job, ranks in self.ranks.items() if self.rank in ranks)

    @property
    def task_id(self) -> int:
        return self.ranks[self.task_type].index(self.rank)


@dataclass(frozen=True, kw_only=True)
class _RoleClaim(task_claims.TaskClaim):
    """One rank's arguments, and the task that its resolver or TF_CONFIG names; sent to all ranks.

    Attributes:
        num_ps: the number of parameter servers; None if it was not given.
        chief: whether one rank only coordinates; None if the other ranks' claims decide.
        component: the number of the rank's component of a heterogeneous Slurm job; None outside such a job.
    """

    num_ps: int | None = None
    chief: bool | None = True
    component: int | None = None


def job_roles(
    topology: Topology,
    all_gather_object: Callable[[Any], list[Any]],
    resolver: ClusterResolver | None,
    num_ps: int | None,
    *,
    chief: bool | None,
    environ: Environment = os.environ,
) -> JobRoles:
    """Return the task of each rank of `topology`, for a strategy with parameter servers.

    With `num_ps`, that many ranks are servers: first the last rank of each node, beginning with the last node, then the
    last but one, and so on. Rank 0 is the chief, or worker 0. With a resolver or TF_CONFIG, each rank has the task that
    its resolver or variable names. In a heterogeneous Slurm job, the ranks of the first component are the chief and the
    servers, and all other ranks are workers.

    Called by: every rank. Communicates once.
    Args:
        resolver: names the tasks. With None or an MPIClusterResolver, `num_ps` gives the roles, else TF_CONFIG, else
            the heterogeneous Slurm job.
        all_gather_object: takes this rank's object, and returns the objects of all ranks, in rank order.
        num_ps: the number of parameter servers; None if a cluster or Slurm gives it.
        chief: True if one rank, the chief, only coordinates and does not train. False if all ranks but the servers
            train; worker 0 leads, or the cluster's chief. None if the other ranks' arguments decide.
    Raises: on all ranks, ValueError if nothing gives the roles, if arguments differ between ranks, or if a server, a
        worker or the chief is missing; TopologyError if the ranks and the cluster contradict each other.
    """
    make_claim = functools.partial(_claim_of_rank, resolver, num_ps, chief, environ)
    claims = task_claims.exchange(make_claim, all_gather_object)
    chief = _agreed_chief(claims)
    task_claims.check_same_cluster(claims)
    if num_ps is not None:
        chiefs = [0] if chief else []
        return _of_servers(topology, _servers_by_node(topology, num_ps, chiefs), chiefs)
    if (spec := claims[0].cluster_spec) is not None:
        return JobRoles(topology.rank, _claimed_tasks(spec, claims, chief), spec)
    return _of_components(topology, [claim.component for claim in claims], chief)


def check_num_ps(num_ps: Any) -> None:
    """Raise ValueError unless `num_ps`, a strategy's number of parameter servers, is an int from 1 on."""
    if not is_integer(num_ps) or num_ps < 1:
        raise ValueError(
            f"num_ps={num_ps!r:.80} must be the number of parameter servers, 1 or more"
        )


def works_alone(topology: Topology, resolver: ClusterResolver | None) -> bool:
    """Return whether this is the only rank, and neither a resolver nor TF_CONFIG names its task.

    Communicates nothing. Called by: the parameter-server strategy of `compat.v1`; if True, it needs no servers.
    """
    of_mpi = isinstance(resolver, (MPIClusterResolver, NoneType))
    return topology.size == 1 and of_mpi and not task_claims.names_cluster(os.environ)


def _claim_of_rank(
    resolver: ClusterResolver | None,
    num_ps: int | None,
    chief: bool | None,
    environ: Environment,
) -> _RoleClaim:
    if not isinstance(resolver, (ClusterResolver, NoneType)):
        raise ValueError(f"cluster_resolver must be a ClusterResolver, got {resolver!r:.80}")
    if isinstance(resolver, MPIClusterResolver):
        resolver = None
    if num_ps is not None:
        check_num_ps(num_ps)
        if resolver is not None:
            raise ValueError(
                f"num_ps={num_ps} and a {resolver.made_of or type(resolver).__name__}, whose cluster lists the "
                "parameter servers, were given: leave one of them out"
            )
        return _RoleClaim(num_ps=num_ps, chief=chief)
    if resolver is None:
        if not task_claims.names_cluster(environ):
            return _RoleClaim(chief=chief, component=own_component(environ))
        resolver = TFConfigClusterResolver(environ=environ)
    return _RoleClaim(
        chief=chief,
        source=resolver.made_of or type(resolver).__name__,
        cluster_spec=resolver.cluster_spec(),  # first, because it sets SlurmClusterResolver's task
        task_type=resolver.task_type,
        task_id=resolver.task_id,
    )


def _agreed_chief(claims: Sequence[_RoleClaim]) -> bool:
    """Return whether there is a chief: the `chief` of the first claim that is not None; False if all are None.

    Raises: ValueError if ranks were given different `num_ps`, or if one has True for `chief` and another has False.
    """
    first = claims[0]
    chief = next((claim.chief for claim in claims if claim.chief is not None), False)
    for rank, claim in enumerate(claims):
        if claim.num_ps != first.num_ps or claim.chief not in (None, chief):
            raise ValueError(
                f"rank 0 was given {_arguments_of(first)}, and rank {rank} {_arguments_of(claim)}: all "
                "ranks need the same"
            )
    return chief


def _arguments_of(claim: _RoleClaim) -> str:
    number = f"num_ps={claim.num_ps}"
    if claim.chief:
        return f"{number} with a chief"
    return f"{number} without a chief"


def _servers_by_node(topology: Topology, num_ps: int, chiefs: Sequence[int]) -> list[int]:
    least = len(chiefs) + 1 + num_ps
    if topology.size < least:
        others = "a worker and the parameter"
        if chiefs:
            others = f"a chief, {others}"
        raise ValueError(
            f"num_ps={num_ps} needs {least} ranks or more, {others} "
            f"servers, but {topology.size} were started: mpirun -n {least} python …, or a smaller num_ps"
        )
    turns = []  # in a turn, each node gives one rank, beginning with the last node
    for node in range(topology.num_nodes):
        for turn, rank in enumerate(reversed(topology.ranks_on_node(node))):
            turns.append((turn, -node, rank))
    servers = [rank for _, _, rank in sorted(turns) if rank != 0]
    return servers[:num_ps]


def _of_components(topology: Topology, components: Sequence[Any], chief: bool) -> JobRoles:
    if None in components:
        raise ValueError(
            "nothing tells which ranks are parameter servers: give num_ps=, their number; or a cluster_resolver or "
            f"{TF_CONFIG} that names each rank's task; or submit a heterogeneous Slurm job with the servers in its "
            "first component"
        )
    lowest = min(components)
    first = [rank for rank, component in enumerate(components) if component == lowest]
    if len(first) == topology.size:
        raise ValueError(
            f"all {topology.size} ranks are in component {lowest} of the heterogeneous Slurm job, whose first "
            "component has the parameter servers: have one srun start the workers, too (--het-group=0,1), or give "
            "num_ps="
        )
    chiefs = first[:1] if chief else []
    servers = first[len(chiefs) :]
    if not servers:
        raise ValueError(
            f"component {lowest} of the heterogeneous Slurm job has 1 rank, the chief, and no parameter server: "
            "give it one task more than the number of servers (--ntasks), or give num_ps="
        )
    return _of_servers(topology, servers, chiefs)


def _of_servers(topology: Topology, servers: Sequence[int], chiefs: Sequence[int]) -> JobRoles:
    workers = sorted({*range(topology.size)}.difference(servers, chiefs))
    tasks = {"chief": chiefs, "worker": workers, "ps": sorted(servers)}
    hosts = topology.hosts or ("localhost",) * topology.num_nodes
    nodes = topology.node_of_rank
    ranks = {}
    spec = {}
    for job, found in tasks.items():
        if found:
            ranks[job] = tuple(found)
            spec[job] = [hosts[nodes[rank]] for rank in found]
    return JobRoles(topology.rank, ranks, ClusterSpec(spec))


def _claimed_tasks(
    spec: ClusterSpec, claims: Sequence[_RoleClaim], chief: bool
) -> dict[str, tuple[int, ...]]:
    _check_jobs(spec, task_claims.describe_cluster(claims[0]), chief)
    for rank, claim in enumerate(claims):
        _check_claim(rank, claim, spec)
    counts = {
        job: count for job in task_roles.TASK_TYPES if (count := task_roles.task_count(spec, job))
    }
    number = sum(counts.values())
    if number != len(claims):
        raise TopologyError(
            f"{len(claims)} ranks were started, but the cluster {spec.as_dict()!r:.300} has {number} tasks: "
            f"mpirun -n {number} python …, or a cluster of as many tasks as ranks"
        )
    rank_of: dict[tuple[Any, Any], int] = {}  # by job and index
    for rank, claim in enumerate(claims):
        job = str(claim.task_type)
        index = claim.task_id
        if index not in range(counts.get(job, 0)):
            raise TopologyError(
                f"rank {rank} is {job} {index}, which is not in the cluster: list it"
            )
        other = rank_of.setdefault((job, index), rank)
        if other != rank:
            raise TopologyError(
                f"ranks {other} and {rank} are both {job} {index} (told by {claim.source}): each "
                "rank needs a task of its own, such as a TF_CONFIG that its launcher does not copy to the others; or "
                "give num_ps= instead"
            )
    ranks = {}
    for job, count in counts.items():
        by_index = [rank_of[job, index] for index in range(count)]
        ranks[job] = tuple(by_index)
    return ranks


def _check_claim(rank: int, claim: _RoleClaim, spec: ClusterSpec) -> None:
    job = claim.task_type
    index = claim.task_id
    if job is None or type(index) is not int:
        raise ValueError(
            f"rank {rank}: {claim.source} names task_type={job!r:.80} and task_id={index!r:.80}, which is no task: "
            "give both, a job and a number"
        )
    try:
        task_roles.validated_cluster(spec, job, index)
    except ValueError as error:
        raise ValueError(f"rank {rank}: {error}") from None


def _check_jobs(spec: ClusterSpec, named: str, chief: bool) -> None:
    task_roles.checked_cluster(spec)
    for job in spec.jobs:
        indices = spec.task_indices(job)
        if indices != list(range(len(indices))):
            raise ValueError(
                f"the tasks of job {job!r} are {indices}: number them 0..n-1, without gaps"
            )
    jobs = [job for job in spec.jobs if spec.num_tasks(job)]
    if "ps" not in jobs:
        raise ValueError(
            f'no parameter server: list one or more as "ps" in {named}, or give num_ps='
        )
    if "worker" not in jobs and (chief or "chief" not in jobs):
        raise ValueError(f'no worker: list one or more as "worker" in {named}')
    if chief and "chief" not in jobs:
        raise ValueError(
            f'no chief: list the rank that coordinates the others as "chief" in {named}, or give num_ps= instead'
        )
