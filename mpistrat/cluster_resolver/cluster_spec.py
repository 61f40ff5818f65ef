"""The tasks of a cluster: job names, task indices and addresses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_TaskDefs = tuple[tuple[int, str], ...]  # (index, address) of each task of a job


@dataclass(frozen=True)
class ClusterDef:
    """The jobs of a ClusterSpec as nested tuples. It can be pickled, compared and hashed."""

    # (("worker", ((0, "n1:8888"), (1, "n2:8888"))),)
    jobs: tuple[tuple[str, _TaskDefs], ...]


class ClusterSpec:
    """The addresses of a cluster's tasks. A job is a group of tasks of one type, such as "worker".

    Args: cluster: a dict from job name to a list of addresses or to {task index: address}; or a ClusterDef or
        ClusterSpec.
    Raises: TypeError for anything else, and for a job name or an address that is no str; ValueError for a task index
        that is no number from 0 on or is given twice.

    Example:
        >>> cluster = ms.cluster_resolver.ClusterSpec({"worker": ["n1:8888", "n2:8888"], "ps": {1: "n3:8888"}})
        >>> cluster.task_address("worker", 1), cluster.job_tasks("ps")
        ('n2:8888', [None, 'n3:8888'])
        >>> cluster.as_dict()
        {'worker': ['n1:8888', 'n2:8888'], 'ps': {1: 'n3:8888'}}

    Example:
        >>> cluster = ms.cluster_resolver.ClusterSpec({"worker": ["n1:8888"], "ps": {1: "n3:8888"}})
        >>> cluster.jobs, cluster.num_tasks("worker"), cluster.task_indices("ps")
        (['worker', 'ps'], 1, [1])
        >>> cluster.as_cluster_def()
        ClusterDef(jobs=(('worker', ((0, 'n1:8888'),)), ('ps', ((1, 'n3:8888'),))))
    """

    def __init__(self, cluster: dict[str, Any] | ClusterDef | ClusterSpec):
        if isinstance(cluster, ClusterSpec):
            cluster = cluster.as_cluster_def()
        if isinstance(cluster, ClusterDef):
            cluster = {job: dict(tasks) for job, tasks in cluster.jobs}
        if not isinstance(cluster, dict):
            raise TypeError(
                f"ClusterSpec: expected a dict of job name to addresses, got {cluster!r:.200}"
            )
        self._jobs = {job: _tasks(job, tasks) for job, tasks in cluster.items()}

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs, in the order in which they were given; [] for an empty cluster."""
        return list(self._jobs)

    def num_tasks(self, job_name: str) -> int:
        """Return the number of tasks of a job, 0 if it has no tasks. Raises: ValueError if there is no such job."""
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Return the indices of a job's tasks in ascending order. Raises: ValueError if there is no such job."""
        return sorted(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Return the address of a task. Raises: ValueError if there is no such job or task."""
        job = self._job(job_name)
        if task_index not in job:
            raise ValueError(
                f"there is no task {task_index!r:.200} in job {job_name!r:.200}: its tasks are {sorted(job)}"
            )
        return job[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Return a list of the job's addresses: entry i is the address of task i, or None if the job has no task i.

        Raises: ValueError if there is no such job, or if it has no tasks.
        """
        job = self._job(job_name)
        if not job:
            raise ValueError(f"job {job_name!r:.200} has no tasks")
        return [job.get(index) for index in range(max(job) + 1)]

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Return a dict from each job to its addresses.

        The addresses are a list if the job's task indices are 0..n-1. They are a dict {index: address} if indices are
        missing or the job has no tasks.
        """
        return {job: _densest(tasks) for job, tasks in self._jobs.items()}

    def as_cluster_def(self) -> ClusterDef:
        """Return the jobs and their addresses as a `ClusterDef`: nested tuples, with tasks sorted by index."""
        jobs = [(job, tuple(sorted(tasks.items()))) for job, tasks in self._jobs.items()]
        return ClusterDef(tuple(jobs))

    def _job(self, job_name: str) -> dict[int, str]:
        if job_name not in self._jobs:
            raise ValueError(
                f"there is no job {job_name!r:.200} in this cluster: its jobs are {self.jobs}"
            )
        return self._jobs[job_name]

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ClusterSpec):
            return self._jobs == other._jobs
        return NotImplemented

    def __hash__(self) -> int:
        return hash(frozenset(self._jobs))

    def __repr__(self) -> str:
        return f"ClusterSpec({dict(sorted(self.as_dict().items()))!r})"


def _tasks(job: object, tasks: object) -> dict[int, str]:
    if not isinstance(job, str):
        raise TypeError(f"ClusterSpec: a job name must be a str, got {job!r:.200}")
    if isinstance(tasks, (list, tuple)):
        tasks = dict(enumerate(tasks))
    if not isinstance(tasks, dict):
        raise TypeError(
            f"ClusterSpec: the tasks of job {job!r:.200} must be a list or a dict of addresses, got "
            f"{tasks!r:.200}"
        )
    indexed: dict[int, str] = {}
    for key, address in tasks.items():
        index = _index(job, key)
        if index in indexed:
            raise ValueError(
                f"ClusterSpec: a task index of job {job!r:.200} is given twice in {tasks!r:.200}"
            )
        if not isinstance(address, str):
            raise TypeError(
                f"ClusterSpec: the address of task {index} of job {job!r:.200} must be a str, got "
                f"{address!r:.200}"
            )
        indexed[index] = address
    return indexed


def _index(job: str, index: Any) -> int:
    try:
        number = int(index)
        if number < 0:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise ValueError(
            f"ClusterSpec: a task index of job {job!r:.200} must be a number from 0 on, got {index!r:.200}"
        ) from None
    return number


def _densest(tasks: dict[int, str]) -> list[str] | dict[int, str]:
    ordered = dict(sorted(tasks.items()))
    dense = ordered and list(ordered) == list(range(len(ordered)))
    return list(ordered.values()) if dense else ordered
