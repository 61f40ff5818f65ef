"""A resolver for a cluster that the caller knows."""

from __future__ import annotations

from mpistrat.cluster_resolver.cluster_resolver import ClusterResolver, format_master_url
from mpistrat.cluster_resolver.cluster_spec import ClusterSpec


class SimpleClusterResolver(ClusterResolver):
    """Answers with what it was given.

    Raises: TypeError when `cluster_spec` is no ClusterSpec or `master` no str.
    """

    launcher = "simple"

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: dict[str, int] | None = None,
        rpc_layer: str | None = None,
    ):
        super().__init__(task_type, task_id, rpc_layer, environment)
        if not isinstance(cluster_spec, ClusterSpec):
            raise TypeError(
                f"cluster_spec must be a ClusterSpec, got {cluster_spec!r}; a dict becomes one by ClusterSpec(…)"
            )
        if not isinstance(master, str):
            raise TypeError(f"master must be an address (str), got {master!r}")
        self._cluster_spec = cluster_spec
        self._master = master
        self._num_accelerators = dict(num_accelerators or {})

    def cluster_spec(self) -> ClusterSpec:
        return self._cluster_spec

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """The address of the task when both its type and id are given here, else the master of the constructor."""
        if None in (task_type, task_id):
            return format_master_url(self._master, rpc_layer or self.rpc_layer)
        return super().master(task_type, task_id, rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None
    ) -> dict[str, int]:
        """What the constructor was given."""
        return dict(self._num_accelerators)
