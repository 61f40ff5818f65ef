"""A resolver for a cluster that a service lists. MPI gives the ranks; the list gives the expected number of tasks."""

from __future__ import annotations

import contextlib
import importlib.util

from mpistrat.cluster_resolver.cluster_resolver import ClusterResolver
from mpistrat.cluster_resolver.mpi import MPIClusterResolver
from mpistrat.cluster_resolver.task_roles import task_count
from mpistrat.errors import TopologyError
from mpistrat.topology import Topology


class ListedTasksResolver(ClusterResolver):
    """A base class of the resolvers that ask a service, such as Kubernetes, for the tasks. Every call asks it again."""

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the address of a task, by default of this task, such as "grpc://10.0.0.1:8470".

        Returns: '' if neither the arguments nor the resolver give both a type and an id.
        Raises: ValueError if the task is not in the service's list.
        """
        return super().master(task_type, task_id, rpc_layer)

    def topology(self) -> Topology:
        """Return MPI's topology, after a check that the list has as many chiefs and workers as MPI has ranks.

        MPI starts before the service is asked. So if the service does not answer, no other rank waits in MPI_Init.
        Called by: every rank.
        Raises: TopologyError if the numbers differ.
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

    def _require(self, module: str, package: str) -> None:
        """Raise ImportError if the Python module `module` is missing. The text names the `package` to install."""
        found = None
        with contextlib.suppress(ImportError):  # the package that contains the module is missing
            found = importlib.util.find_spec(module)
        if found is None:
            raise ImportError(
                f"{type(self).__name__} needs the package {package}: pip install {package}"
            )
