"""A resolver for the virtual machines of an instance group of Google Compute Engine."""

from __future__ import annotations

import functools
from typing import Any

from mpistrat.cluster_resolver.cluster_spec import ClusterSpec
from mpistrat.cluster_resolver.listed_tasks import ListedTasksResolver
from mpistrat.errors import UnavailableError

SECONDS = 15.0  # timeout of each request, and of all its repetitions while the service is busy


class GCEClusterResolver(ListedTasksResolver):
    """Finds the running virtual machines of an instance group; each is a task. Every call lists them again.

    A machine's address is the internal IP of its first network interface. Tasks are sorted by address, as text.
    `topology()` gets the ranks from MPI.

    Args:
        project, zone, instance_group: the names of the group, and of its zone and project.
        port: the port of every task's address.
        task_type: the type of all tasks. Setting it later raises RuntimeError.
        task_id: `master()` returns the address of this task. MPI gives this process's rank, and not `task_id`.
        credentials: credentials of google.auth; a string means the application default credentials.
        client_options: options of the clients of google.cloud.compute_v1, such as {"api_endpoint": …}. They replace
            `service` of tf.distribute, an argument for an older library.
    Raises: ImportError without the package google-cloud-compute (extra `gce`). `cluster_spec`, `master` and `topology`
        raise UnavailableError if the API cannot be reached, or refuses.

    Example, on Google Cloud::

        resolver = ms.cluster_resolver.GCEClusterResolver("project", "us-west1-a", "workers", port=8470)
        print(resolver.cluster_spec(), resolver.master("worker", 0))
        assert resolver.topology().size == resolver.cluster_spec().num_tasks("worker")
    """

    launcher = "gce"

    def __init__(
        self,
        project: str,
        zone: str,
        instance_group: str,
        port: int,
        task_type: str = "worker",
        task_id: int | None = 0,
        rpc_layer: str | None = "grpc",
        credentials: Any = "default",
        client_options: Any = None,
    ):
        super().__init__(task_type, task_id, rpc_layer)
        self._require("google.cloud.compute_v1", "google-cloud-compute")
        self._place = {"project": project, "zone": zone}
        self._group = instance_group
        self._port = port
        if isinstance(credentials, str):
            credentials = None  # the application default credentials
        self._options = {"credentials": credentials, "client_options": client_options}

    @functools.cached_property
    def _clients(self) -> tuple[Any, Any]:
        """The two clients of the API, made at the first use: (for instance groups, for instances)."""
        from google.cloud import compute_v1

        options = self._options
        return compute_v1.InstanceGroupsClient(**options), compute_v1.InstancesClient(**options)

    def cluster_spec(self) -> ClusterSpec:
        from google.api_core.exceptions import GoogleAPIError
        from google.auth.exceptions import GoogleAuthError

        try:
            addresses = sorted(f"{address}:{self._port}" for address in self._addresses())
        except (GoogleAPIError, GoogleAuthError, OSError) as error:
            raise UnavailableError(
                f"the instance group {self._group!r:.80} ({self._place}) cannot be listed: {error}"
            ) from error
        return ClusterSpec({str(self.task_type): addresses})

    def _set(self, name: str, value: Any) -> None:
        if name == "task_type":
            raise RuntimeError(
                "the task_type of a GCEClusterResolver is fixed for its instance group; give it to the constructor"
            )
        super()._set(name, value)

    def _addresses(self) -> list[str]:
        from google.api_core.exceptions import ServiceUnavailable
        from google.api_core.retry import Retry, if_exception_type

        groups, instances = self._clients
        again = Retry(if_exception_type(ServiceUnavailable), initial=0.3, timeout=SECONDS)
        limits: dict[str, Any] = {"timeout": SECONDS, "retry": again}
        listed = groups.list_instances(
            {
                **self._place,
                "instance_group": self._group,
                "instance_groups_list_instances_request_resource": {"instance_state": "RUNNING"},
            },
            **limits,
        )
        addresses = []
        for member in listed:  # the iterator requests further pages
            name = member.instance.rpartition("/")[2]  # "…/zones/us-west1-a/instances/vm-1"
            instance = instances.get({**self._place, "instance": name}, **limits)
            addresses.append(instance.network_interfaces[0].network_i_p)
        return addresses
