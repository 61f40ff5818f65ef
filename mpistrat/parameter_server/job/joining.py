"""How a rank joins a job with parameter servers, and the checks of its strategy's arguments."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mpistrat.cluster_resolver import ClusterResolver, MPIClusterResolver, SimpleClusterResolver
from mpistrat.cluster_resolver.roles.job_roles import JobRoles, job_roles
from mpistrat.cluster_resolver.task_roles import Cluster, normalize_cluster_spec
from mpistrat.cluster_resolver.tf_config import TFConfigClusterResolver
from mpistrat.communicators.communicator import Communicator, RaisingOnAll
from mpistrat.communicators.of_resolver import communicator_of
from mpistrat.errors import CollectiveMismatchError
from mpistrat.machine.devices import accelerator, check_devices
from mpistrat.strategies.binding import bind
from mpistrat.strategies.threads import share_cores

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpistrat.parameter_server.job.job import ServerJob


def join_job(
    cluster_resolver: ClusterResolver | None,
    num_ps: int | None,
    comm: MPI.Intracomm | None,
    devices: Sequence[str] | None,
    *,
    chief: bool | None,
    description: str | None = None,
    replication: int = 1,
) -> tuple[ServerJob, tuple[str, ...]]:
    """Meet the other ranks, and find this rank's task. Waits for all ranks. Warns if `replication` has no effect.

    Called by: every rank of `comm`, in the constructor of its strategy or in `Server.start`.
    Args:
        devices: this rank's devices; a server ignores them and uses its CPU.
        chief: whether a chief schedules functions; None if this rank makes a `Server` and does not know.
        description: the strategy and its arguments that all ranks must share; None on a rank without a strategy.
        replication: the number of servers that keep each variable, 1 or 2.
    Returns: the job, and the names of this rank's devices.
    Raises: on all ranks: CollectiveMismatchError if the ranks make different strategies; ValueError if workers have
        different numbers of devices, for two copies on a single server, or for wrong tasks; TopologyError if ranks
        contradict each other about tasks; the error of a rank that cannot use its devices.
    """
    sys.audit("mpistrat.servers")  # `mpistrat verify` hears it
    resolver = MPIClusterResolver(comm)
    if resolver.comm is None:  # without MPI, so that a single rank gets the same errors as with MPI
        job_roles(resolver.topology(), lambda claim: [claim], cluster_resolver, num_ps, chief=chief)
    from mpistrat.parameter_server.job.job import ServerJob, meeting

    with meeting():
        topology = resolver.topology()
        communicator = communicator_of(resolver, "always", "strategy with parameter servers")
        roles = job_roles(
            topology, communicator.all_gather_object, cluster_resolver, num_ps, chief=chief
        )
        # Servers need no GPU and leave the node's GPUs to the other ranks.
        if roles.task_type == "ps":
            devices = ("cpu:0",)
        with RaisingOnAll(communicator, "cannot use its devices"):
            checked = check_devices(devices)
        number = len(checked) if checked else 1
        replication = _agreed_replication(communicator, roles, (description, replication, number))
        share_cores(communicator, topology)
        job = ServerJob(resolver.comm, topology, roles, replication > 1)
        bound = bind(communicator, topology, checked)
    is_first_trainer = roles.rank == job.trainers[0]
    if is_first_trainer and replication > 1 and not job.outlives_ranks:
        warnings.warn(
            f"replication={replication} is of no use here, because the death of any rank ends the job: "
            f"{job.why_not_fault_tolerant}",
            RuntimeWarning,
            stacklevel=3,
        )
    job.begin(chief is True and roles.task_type == "chief")
    return job, bound


def _agreed_replication(
    communicator: Communicator, roles: JobRoles, arguments: tuple[str | None, int, int]
) -> int:
    """Compare the ranks' arguments, and return the number of servers that keep each variable. Collective.

    Args: arguments: this rank's strategy (None without one), replication, and number of devices.
    Returns: the largest `replication` of all ranks, because a rank that makes a `Server` gives 1.
    Raises: on all ranks: CollectiveMismatchError if the ranks make different strategies; ValueError if workers and
        chief have different numbers of devices, or there are fewer servers than copies.
    """
    of_ranks = communicator.all_gather_object(arguments, label="strategies")
    strategies, copies, replicas = zip(*of_ranks, strict=True)
    if len({*strategies} - {None}) > 1:
        raise CollectiveMismatchError(
            f"the ranks make different strategies, by rank: {[*strategies]}"
        )
    chief = roles.ranks.get("chief", ())
    clients = (*chief, *roles.ranks["worker"])
    numbers = {replicas[rank] for rank in clients}
    if len(numbers) > 1:
        by_rank = ", ".join(f"{replicas[rank]} on rank {rank}" for rank in clients)
        raise ValueError(
            f"all workers, and a chief, need the same number of devices, got {by_rank}"
        )
    replication: int = max(copies)  # the ranks of a `Server` have no such argument and say 1
    if replication > len(roles.ranks["ps"]):
        raise ValueError(
            f"replication={replication} needs as many parameter servers, each with a copy of its own, but there is "
            "1: give num_ps=2 or more, or list more of them"
        )
    return replication


def resolver_of(roles: JobRoles) -> ClusterResolver:
    """Return a resolver of this rank's task, as TF_CONFIG gives one."""
    return SimpleClusterResolver(
        roles.cluster_spec, task_type=roles.task_type, task_id=roles.task_id
    )


def resolver_of_task(
    cluster_resolver: ClusterResolver | None,
    cluster_spec: Cluster,
    task_type: str | None,
    task_id: int | None,
) -> ClusterResolver | None:
    """Return a resolver of the task that `cluster_spec`, `task_type` and `task_id` name.

    Without `cluster_spec` the cluster comes from TF_CONFIG. Without all three, return `cluster_resolver`, also if None.
    Raises: ValueError if `cluster_resolver` and one of the three are given.
    """
    if not cluster_spec and (task_type, task_id) == (None, None):
        return cluster_resolver
    if cluster_resolver is not None:
        raise ValueError(
            "cluster_resolver names this rank's task: leave out cluster_spec, task_type and task_id"
        )
    if not cluster_spec:
        return TFConfigClusterResolver(task_type, task_id)
    spec = normalize_cluster_spec(cluster_spec)
    resolver = SimpleClusterResolver(spec, task_type=task_type, task_id=task_id)
    resolver.made_of = "cluster_spec"
    return resolver


def devices_of_worker(
    devices: Sequence[str] | None, num_gpus_per_worker: int | None
) -> Sequence[str] | None:
    """Return names of the first `num_gpus_per_worker` GPUs, ["cpu:0"] for 0, or `devices` if the number is None.

    Does not check that the rank has these GPUs.
    Raises: ValueError if both arguments are given, or the number is no int of 0 or more.
    """
    if num_gpus_per_worker is None:
        return devices
    if devices is not None:
        raise ValueError("num_gpus_per_worker and devices both name devices: give one")
    if type(num_gpus_per_worker) is not int or num_gpus_per_worker < 0:
        raise ValueError(
            f"num_gpus_per_worker must be a number of GPUs, 0 or more, got {num_gpus_per_worker!r:.60}"
        )
    if not num_gpus_per_worker:
        return ["cpu:0"]
    kind = accelerator() or "cuda"
    return [f"{kind}:{i}" for i in range(num_gpus_per_worker)]


def check_arguments(partitioner: Any, replication: Any) -> None:
    """Raises: ValueError if `partitioner` is neither None nor callable, or `replication` is not 1 or 2."""
    if partitioner is not None and not callable(partitioner):
        raise ValueError(
            f"variable_partitioner must be a function of shape and dtype, such as ms.experimental.partitioners."
            f"FixedShardsPartitioner(2), got {partitioner!r:.60}"
        )
    if type(replication) is not int or replication not in (1, 2):
        raise ValueError(
            "replication must be the number of parameter servers that have a copy of each variable, 1 or 2, got "
            f"{replication!r:.60}"
        )
