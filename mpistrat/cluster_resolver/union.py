"""Several resolvers as one cluster."""

from __future__ import annotations

import itertools
from typing import Any

from mpistrat.cluster_resolver.cluster_resolver import ClusterResolver, format_master_url
from mpistrat.cluster_resolver.cluster_spec import ClusterSpec


class UnionResolver(ClusterResolver):
    """The jobs of several resolvers together; what only one can answer, the first one does.

    The tasks of a job that several name follow one another in the order of the resolvers. Where one of them
    gives task indices with gaps, the indices are kept, and two tasks of one index are a KeyError in `cluster_spec`.

    Args: task_type, task_id, rpc_layer: instead of the first resolver's; 0, "" and None mean the first resolver's.
    Raises: ValueError without any resolver; TypeError for what is no ClusterResolver.
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
        """The tasks of all resolvers.

        Raises: KeyError when two resolvers give the same index of a job to different tasks.
        """
        parts: dict[str, list[list[str] | dict[int, str]]] = {}
        for resolver in self._resolvers:
            for job, tasks in resolver.cluster_spec().as_dict().items():
                parts.setdefault(job, []).append(tasks)
        return ClusterSpec({job: _merge(job, parts[job]) for job in parts})

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """The address of the task when both its type and id are given here, else the first resolver's master."""
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
        return self._resolvers[0].environment

    def _get(self, name: str) -> Any:
        return self._values[name] or getattr(self._resolvers[0], name)


def _merge(job: str, parts: list[list[str] | dict[int, str]]) -> list[str] | dict[int, str]:
    lists = [part for part in parts if isinstance(part, list)]
    # an empty job comes as {} and has no indices to keep
    if len(lists) + parts.count({}) == len(parts):
        return list(itertools.chain(*lists))
    merged: dict[int, str] = {}
    for part in parts:
        tasks = dict(enumerate(part)) if isinstance(part, list) else part
        if clash := sorted(merged.keys() & tasks.keys()):
            raise KeyError(f"several resolvers name the tasks {clash} of job {job!r}")
        merged.update(tasks)
    return merged
