"""Ranks, counts and leaders of the task types chief, worker, ps and evaluator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpistrat.cluster_resolver.cluster_spec import ClusterDef, ClusterSpec

TASK_TYPES = ("chief", "worker", "evaluator", "ps")

Cluster = dict[str, Any] | ClusterDef | ClusterSpec | None


def normalize_cluster_spec(cluster_spec: Cluster) -> ClusterSpec:
    """Return `cluster_spec` as a new ClusterSpec; None becomes the empty cluster.

    Raises: ValueError if it is no dict, ClusterDef or ClusterSpec.
    """
    if cluster_spec is None:
        return ClusterSpec({})
    if not isinstance(cluster_spec, (dict, ClusterDef, ClusterSpec)):
        raise ValueError(
            f"a cluster must be a dict, a ClusterDef or a ClusterSpec, got {cluster_spec!r}"
        )
    return ClusterSpec(cluster_spec)


def task_count(cluster_spec: Cluster, task_type: str) -> int:
    spec = normalize_cluster_spec(cluster_spec)
    return len(spec.as_dict().get(task_type, ()))


def checked_cluster(cluster_spec: Cluster) -> ClusterSpec:
    """Return `cluster_spec` as a ClusterSpec, after a check of its job names and counts.

    Raises: ValueError if a job is not "chief", "worker", "evaluator" or "ps", or if there are several chiefs or several
        evaluators.
    """
    spec = normalize_cluster_spec(cluster_spec)
    if unknown := [job for job in spec.jobs if job not in TASK_TYPES]:
        raise ValueError(f"the cluster has the jobs {unknown}, expected only {TASK_TYPES}")
    for job in ("chief", "evaluator"):
        if task_count(spec, job) > 1:
            raise ValueError(
                f"the cluster has {task_count(spec, job)} tasks of type {job!r}, expected at most one"
            )
    return spec


def validated_cluster(
    cluster_spec: Cluster, task_type: str | None, task_id: int | None
) -> ClusterSpec:
    """Return `cluster_spec` as a ClusterSpec, after a check that the task is in it.

    The task is not checked if `task_type` is None, or "evaluator", because clusters do not always list evaluators.
    Raises: ValueError if the cluster has an unknown job, several chiefs or several evaluators, or if the task is not in
        it.
    """
    spec = checked_cluster(cluster_spec)
    if task_type in (None, "evaluator"):
        return spec
    if task_type not in TASK_TYPES:
        raise ValueError(f"task_type={task_type!r} is not one of {TASK_TYPES}")
    if task_type not in spec.jobs:
        raise ValueError(f"task_type={task_type!r} is not in the cluster: its jobs are {spec.jobs}")
    count = spec.num_tasks(task_type)
    if task_id not in range(count):
        raise ValueError(
            f"task_id={task_id!r} is not one of the {count} tasks of job {task_type!r} (0..{count - 1})"
        )
    return spec


def is_chief(
    cluster_spec: Cluster = None, task_type: str | None = None, task_id: int | None = None
) -> bool:
    """Return whether this task is the chief, an evaluator, or worker 0 of a cluster without a chief.

    Such a task does the work that only one task may do, such as writing files.
    Returns: False also if `task_type` is None.
    Raises: ValueError if the task is not in the cluster, or if the cluster has an unknown job, several chiefs or
        several evaluators.
    """
    spec = validated_cluster(cluster_spec, task_type, task_id)
    return task_type in ("chief", "evaluator") or (
        task_type == "worker" and task_id == 0 and not task_count(spec, "chief")
    )


def id_in_cluster(cluster_spec: Cluster, task_type: str | None, task_id: int | None) -> int:
    """Return this task's rank among the tasks that train: the chief has rank 0, and the workers follow.

    For an evaluator, return its task id.
    Raises: ValueError if the task is a parameter server, because servers have no rank, or if it is not in the cluster.
    """
    spec = validated_cluster(cluster_spec, task_type, task_id)
    if task_type not in ("chief", "worker", "evaluator") or task_id is None:
        raise ValueError(
            f"a task of type {task_type!r} has no rank: only chief, worker and evaluator tasks have one"
        )
    if task_type == "worker":
        return task_count(spec, "chief") + task_id
    return task_id


def worker_count(cluster_spec: Cluster, task_type: str | None) -> int:
    """Return the number of chiefs and workers; if `task_type` is "evaluator", return the number of evaluators.

    Raises: ValueError if `task_type` is not "chief", "worker" or "evaluator", or if a chief or worker is asked for and
        the cluster lists no such job; KeyError for "evaluator" if the cluster lists no evaluator.
    """
    spec = validated_cluster(cluster_spec, task_type, 0)
    if task_type not in ("chief", "worker", "evaluator"):
        raise ValueError(
            f"a task of type {task_type!r} does not train: expected chief, worker or evaluator"
        )
    if task_type != "evaluator":
        return task_count(spec, "chief") + task_count(spec, "worker")
    if "evaluator" not in spec.jobs:
        raise KeyError(f"the cluster lists no evaluator: its jobs are {spec.jobs}")
    return task_count(spec, "evaluator")


def worker_addresses(cluster_spec: Cluster) -> list[str]:
    """Return the addresses of the tasks that train, in rank order: the chief, then the workers.

    Raises: ValueError if the cluster has neither chief nor worker, or if a task index from 0 to n-1 is missing.
    """
    spec = normalize_cluster_spec(cluster_spec)
    addresses: list[Any] = []
    for job in ("chief", "worker"):
        if task_count(spec, job):
            addresses += spec.job_tasks(job)
    if not addresses or None in addresses:
        raise ValueError(
            f"the ranks of a job are its chief and its workers 0..n-1 without gaps, got {spec}"
        )
    return addresses


def collective_leader(cluster_spec: Cluster, task_type: str | None, task_id: int | None) -> str:
    """Return the name of the task that leads collectives: the chief, else worker 0. As in tf.distribute.

    Returns: a name such as "/job:chief/replica:0/task:0"; '' for an empty cluster, and if this task is an evaluator.
    Raises: ValueError if the task is not in the cluster, or if the cluster has neither chief nor worker.
    """
    if not normalize_cluster_spec(cluster_spec):
        return ""
    spec = validated_cluster(cluster_spec, task_type, task_id)
    if task_type == "evaluator":
        return ""
    return _first_task(spec, ("chief", "worker"))


def coordination_leader(cluster_spec: Cluster) -> str:
    """Return the name of the task where other tasks register: ps 0, else the chief, else worker 0. As in tf.distribute.

    Returns: a name such as "/job:ps/replica:0/task:0"; '' for an empty cluster.
    Raises: ValueError if the cluster has tasks, but none of these types.
    """
    spec = normalize_cluster_spec(cluster_spec)
    return _first_task(spec, ("ps", "chief", "worker")) if spec else ""


@dataclass(frozen=True)
class ServerDef:
    """Describes a server: its cluster, and its task in the cluster. `mpistrat.Server` takes it.

    Attributes:
        cluster: all tasks of the job, with their addresses.
        job_name, task_index: the server's task.
        protocol: the name of a protocol; has no effect, because MPI moves the bytes.
    """

    cluster: ClusterDef
    job_name: str
    task_index: int
    protocol: str = "grpc"


def make_server_def(
    cluster: dict[str, Any] | ClusterDef | ClusterSpec,
    job_name: str | None = None,
    task_index: int | None = None,
    protocol: str | None = None,
) -> ServerDef:
    """Return the `ServerDef` of one task of `cluster`. Called by: `mpistrat.Server`.

    Args:
        job_name: the task's job; None if the cluster has a single job.
        task_index: the task's index; None if the job has a single task.
        protocol: None is "grpc".
    Raises: ValueError if `job_name` is None and the cluster has not exactly one job, if `task_index` is None and the
        job has not exactly one task, or if there is no such task; TypeError if `cluster` is no cluster.
    """
    spec = ClusterSpec(cluster)
    if job_name is None:
        if len(spec.jobs) != 1:
            raise ValueError(f"job_name must be given: the cluster has the jobs {spec.jobs}")
        job_name = spec.jobs[0]
    if task_index is None:
        indices = spec.task_indices(job_name)
        if len(indices) != 1:
            raise ValueError(f"task_index must be given: job {job_name!r} has the tasks {indices}")
        task_index = indices[0]
    spec.task_address(job_name, task_index)
    return ServerDef(spec.as_cluster_def(), job_name, task_index, protocol or "grpc")


def _first_task(spec: ClusterSpec, preference: tuple[str, ...]) -> str:
    for job in preference:
        if job in spec.jobs:
            return f"/job:{job}/replica:0/task:0"
    raise ValueError(
        f"the cluster has no task that could lead: expected one of {preference}, its jobs are {spec.jobs}"
    )
