"""A cluster that a service lists: MPI tells who is who, the list how many there should be."""

from __future__ import annotations

import contextlib
import importlib.util

from mpistrat.cluster_resolver.cluster_resolver import ClusterResolver
from mpistrat.cluster_resolver.mpi import MPIClusterResolver
from mpistrat.cluster_resolver.roles.task_roles import task_count
from mpistrat.errors import TopologyError
from mpistrat.topology import Topology


class ListedTasksResolver(ClusterResolver):
    """The tasks that a service lists, asked again at every call."""

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """The address of the task, by default this one's; '' as long as nothing tells a task."""
        return super().master(task_type, task_id, rpc_layer)

    def topology(self) -> Topology:
        """MPI's, of as many ranks as the cluster has tasks that train, its chief and its workers.

        Called by: every rank. MPI is asked first, so that a service that does not answer is an error and not a wait.
        Raises: TopologyError when the numbers differ.
        """
        topology = MPIClusterResolver().topology()
        spec = self.cluster_spec()
        listed = task_count(spec, "chief") + task_count(spec, "worker")
        if listed != topology.size:
            raise TopologyError(
                f"{type(self).__name__} lists {listed} tasks that train ({spec.as_dict()!r:.300}), but MPI has started "
                f"{topology.size} ranks: start one rank per task, or leave cluster_resolver out to ask MPI alone"
            )
        return topology

    def _require(self, module: str, extra: str, package: str) -> None:
        """Raises: ImportError, with the command that installs it, where the client library `module` is missing."""
        found = None
        with contextlib.suppress(ImportError):  # not even the package that it is in
            found = importlib.util.find_spec(module)
        if found is None:
            raise ImportError(
                f"{type(self).__name__} needs the package {package}: pip install 'mpistrat[{extra}]', or "
                f"pip install {package}"
            )
