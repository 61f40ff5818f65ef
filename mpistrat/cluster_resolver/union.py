"""A resolver that joins the clusters of several resolvers."""

from __future__ import annotations

import itertools
from typing import Any

from mpistrat.cluster_resolver.cluster_resolver import ClusterResolver, format_master_url
from mpistrat.cluster_resolver.cluster_spec import ClusterSpec

_Tasks = list[str] | dict[int, str]  # the addresses of a job, as in `ClusterSpec.as_dict`


class UnionResolver(ClusterResolver):
    """Joins the jobs of several resolvers to one cluster. All other values come from the first resolver.

    If several resolvers have the same job, the tasks get new indices, in the order of the resolvers. But if one of
    these resolvers lacks an index between 0 and its highest, all tasks keep their indices.

    Args:
        cluster_resolvers: one or more ClusterResolvers.
        task_type, task_id, rpc_layer: are used instead of the first resolver's values; 0, "" and None mean the first
            resolver's.
    Raises: ValueError without a resolver or with an unknown keyword; TypeError if a resolver is no ClusterResolver.

    Example:
        >>> simple, spec = ms.cluster_resolver.SimpleClusterResolver, ms.cluster_resolver.ClusterSpec
        >>> workers, servers = simple(spec({"worker": ["n1:8888"]}), "n1:8888"), simple(spec({"ps": ["n2:8888"]}))
        >>> union = ms.cluster_resolver.UnionResolver(workers, servers)
        >>> union.cluster_spec(), union.master(), union.num_accelerators(), union.environment
        (ClusterSpec({'ps': ['n2:8888'], 'worker': ['n1:8888']}), 'n1:8888', {}, '')
    """

    launcher = "union"

    def __init__(
        self,
        *cluster_resolvers: ClusterResolver,
        rpc_layer: str | None = None,
        task_type: str | None = None,
        task_id: int | None = None,
        **unknown: object,
    ):
        super().__init__(task_type, task_id, rpc_layer)
        if unknown:
            raise ValueError(
                f"unexpected arguments {sorted(unknown)}; known are rpc_layer, task_type and task_id"
            )
        if not cluster_resolvers:
            raise ValueError("expected at least one ClusterResolver")
        for resolver in cluster_resolvers:
            if not isinstance(resolver, ClusterResolver):
                raise TypeError(f"expected only ClusterResolvers, got {resolver!r}")
        self._resolvers = cluster_resolvers

    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks of all resolvers, with the indices that the class describes.

        Raises: KeyError if the tasks of a job keep their indices, and two resolvers have the same index.
        """
        parts: dict[str, list[_Tasks]] = {}
        for resolver in self._resolvers:
            for job, tasks in resolver.cluster_spec().as_dict().items():
                parts.setdefault(job, []).append(tasks)
        return ClusterSpec({job: _merge(job, parts[job]) for job in parts})

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the address of the task that the arguments name; without a type or an id, the first resolver's master.

        Raises: ValueError if the task is in no resolver's cluster.
        """
        if task_type is None or task_id is None:
            return self._resolvers[0].master(rpc_layer=rpc_layer)
        address = self.cluster_spec().task_address(task_type, task_id)
        return format_master_url(address, rpc_layer or self._values["rpc_layer"])

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None
    ) -> dict[str, int]:
        return self._resolvers[0].num_accelerators(task_type, task_id)

    @property
    def environment(self) -> str | None:
        """The first resolver's `environment`."""
        return self._resolvers[0].environment

    def _get(self, name: str) -> Any:
        return self._values[name] or getattr(self._resolvers[0], name)


def _merge(job: str, parts: list[_Tasks]) -> _Tasks:
    lists = [part for part in parts if isinstance(part, list)]
    # A job without tasks is {}, and has no indices to keep
    if len(lists) + parts.count({}) == len(parts):
        return list(itertools.chain(*lists))
    merged: dict[int, str] = {}
    for part in parts:
        tasks = dict(enumerate(part)) if isinstance(part, list) else part
        if clash := sorted(merged.keys() & tasks.keys()):
            raise KeyError(f"several resolvers name the tasks {clash} of job {job!r}")
        merged.update(tasks)
    return merged
