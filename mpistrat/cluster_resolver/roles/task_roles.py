"""What the task types chief, worker, ps and evaluator mean: ranks, counts, leaders."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from mpistrat.cluster_resolver.cluster_spec import ClusterDef, ClusterSpec

TASK_TYPES = ("chief", "worker", "evaluator", "ps")

Cluster = dict[str, Any] | ClusterDef | ClusterSpec | None


def normalize_cluster_spec(cluster_spec: Cluster) -> ClusterSpec:
    """`cluster_spec` as a ClusterSpec; None is the empty cluster.

    Raises: ValueError when it is neither None, a dict, a ClusterDef nor a ClusterSpec.
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
    return spec.num_tasks(task_type) if task_type in spec.jobs else 0


def checked_cluster(cluster_spec: Cluster) -> ClusterSpec:
    """Raises: ValueError for jobs and numbers of tasks that cannot be."""
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
    """`cluster_spec`, in which this task may be; no type is any task.

    Raises: ValueError for jobs, numbers of tasks and a task that cannot be.
    """
    spec = checked_cluster(cluster_spec)
    # Evaluators are not always listed in the cluster.
    if task_type in (None, "evaluator"):
        return spec
    if task_type not in TASK_TYPES:
        raise ValueError(f"task_type={task_type!r} is not one of {TASK_TYPES}")
    if task_type not in spec.jobs:
        raise ValueError(f"task_type={task_type!r} is not in the cluster: its jobs are {spec.jobs}")
    count = spec.num_tasks(task_type)
    if task_id is None or not 0 <= task_id < count:
        raise ValueError(
            f"task_id={task_id!r} is not one of the {count} tasks of job {task_type!r} (0..{count - 1})"
        )
    return spec


def is_chief(
    cluster_spec: Cluster = None, task_type: str | None = None, task_id: int | None = None
) -> bool:
    """Whether this task does what only one may do: the chief, an evaluator, or worker 0 where there is no chief."""
    spec = validated_cluster(cluster_spec, task_type, task_id)
    return task_type in ("chief", "evaluator") or (
        task_type == "worker" and task_id == 0 and not task_count(spec, "chief")
    )


def id_in_cluster(cluster_spec: Cluster, task_type: str | None, task_id: int | None) -> int:
    """This task's rank among the tasks that train: the chief first, then the workers. An evaluator counts its own.

    Raises: ValueError for a parameter server, which has no rank, and for tasks that are not in the cluster.
    """
    spec = validated_cluster(cluster_spec, task_type, task_id)
    if task_type not in ("chief", "worker", "evaluator") or task_id is None:
        raise ValueError(
            f"a task of type {task_type!r} has no rank: only chief, worker and evaluator tasks have one"
        )
    return task_id + (task_count(spec, "chief") if task_type == "worker" else 0)


def worker_count(cluster_spec: Cluster, task_type: str | None) -> int:
    """How many tasks train together with a task of this type, itself included.

    Raises: ValueError for types that do not train; KeyError for an evaluator that the cluster does not list.
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
    """Addresses of the tasks that train, in rank order.

    Raises: ValueError when there are none, or when task indices are missing.
    """
    spec = normalize_cluster_spec(cluster_spec)
    jobs = [spec.job_tasks(job) for job in ("chief", "worker") if task_count(spec, job)]
    addresses: list[Any] = [*itertools.chain(*jobs)]
    if not addresses or None in addresses:
        raise ValueError(
            f"the ranks of a job are its chief and its workers 0..n-1 without gaps, got {spec}"
        )
    return addresses


def collective_leader(cluster_spec: Cluster, task_type: str | None, task_id: int | None) -> str:
    """Name of the task that leads collectives; '' for an empty cluster and for an evaluator."""
    if not normalize_cluster_spec(cluster_spec):
        return ""
    spec = validated_cluster(cluster_spec, task_type, task_id)
    return "" if task_type == "evaluator" else _first_task(spec, ("chief", "worker"))


def coordination_leader(cluster_spec: Cluster) -> str:
    """Name of the task that others register with: ps 0, else the chief, else worker 0; '' for an empty cluster."""
    spec = normalize_cluster_spec(cluster_spec)
    return _first_task(spec, ("ps", "chief", "worker")) if spec else ""


@dataclass(frozen=True)
class ServerDef:
    """One task of a cluster, as a server needs to know itself."""

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
    """The task `job_name`, `task_index`; each may be left out where the cluster allows only one answer.

    Raises: ValueError when it allows several or none; TypeError when `cluster` is no cluster.
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
