"""A resolver for a cluster that the program itself describes."""

from __future__ import annotations

from mpistrat.cluster_resolver.cluster_resolver import ClusterResolver, format_master_url
from mpistrat.cluster_resolver.cluster_spec import ClusterSpec


class SimpleClusterResolver(ClusterResolver):
    """A resolver whose methods return the constructor's arguments.

    Args:
        cluster_spec: the tasks and their addresses.
        master: the address that `master()` returns if it is not given a task.
        task_type, task_id: this process's task, such as "worker" and 1; None if not known.
        num_accelerators: the value that `num_accelerators()` returns; None is {}.
        rpc_layer: the prefix of `master()`, such as "grpc".
    Raises: TypeError if `cluster_spec` is no ClusterSpec or `master` is no str.

    Example:
        >>> spec = ms.cluster_resolver.ClusterSpec({"worker": ["n1:8888", "n2:8888"]})
        >>> resolver = ms.cluster_resolver.SimpleClusterResolver(spec, "n1:8888", num_accelerators={"GPU": 4})
        >>> resolver.master(), resolver.master("worker", 1), resolver.num_accelerators()
        ('n1:8888', 'n2:8888', {'GPU': 4})
        >>> resolver.cluster_spec()
        ClusterSpec({'worker': ['n1:8888', 'n2:8888']})
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
        """Return the address of the task that the arguments name, else the constructor's `master`, with `rpc_layer`.

        Raises: ValueError if the task is not in the cluster.
        """
        if None in (task_type, task_id):
            return format_master_url(self._master, rpc_layer or self.rpc_layer)
        return super().master(task_type, task_id, rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None
    ) -> dict[str, int]:
        """Return a copy of the constructor's `num_accelerators`; {} if it was None."""
        return dict(self._num_accelerators)
