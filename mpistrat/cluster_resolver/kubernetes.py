"""The pods of a Kubernetes cluster that match label selectors."""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpistrat.cluster_resolver.cluster_spec import ClusterSpec
from mpistrat.cluster_resolver.listed_tasks import ListedTasksResolver
from mpistrat.errors import UnavailableError

_SECONDS = (5, 15)  # to connect, and for the answer
_TRIES_AGAIN = 1


class KubernetesExecutableLocation(enum.Enum):
    """Where this process runs, and so how it may ask the API server."""

    WITHIN_CLUSTER = 0  # in a pod: with its service account
    OFF_CLUSTER = 1  # with $KUBECONFIG or ~/.kube/config


class KubernetesClusterResolver(ListedTasksResolver):
    """The pods that match label selectors, listed again at every call.

    Args:
        job_to_label_mapping: selectors of each job, default {"worker": ["job-name=tensorflow"]}. The pods of a selector
            are sorted by name; those of several follow one another in the order of the selectors.
        tf_server_port: of every task's address, whose host is the pod's node.
        override_client: a kubernetes.client.CoreV1Api that is asked instead.
    `task_type` and `task_id` are None until they are set: no list tells which of the pods this is. MPI does.
    Raises: ImportError without the package kubernetes (extra `kubernetes`); ValueError for what is no location or no
        mapping; by members that list, RuntimeError when a pod is not running, or pods may not be listed, and
        UnavailableError when the API server cannot be reached.
    """

    launcher = "kubernetes"

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str | None = "grpc",
        override_client: Any = None,
        executable_location: KubernetesExecutableLocation = KubernetesExecutableLocation.WITHIN_CLUSTER,
    ):
        super().__init__(rpc_layer=rpc_layer)
        if override_client is None:
            self._require("kubernetes", "kubernetes", "kubernetes")
        else:
            self._client = override_client
        if not isinstance(executable_location, KubernetesExecutableLocation):
            raise ValueError(
                f"executable_location={executable_location!r:.80} must be an KubernetesExecutableLocation"
            )
        self._selectors = dict(job_to_label_mapping or {"worker": ["job-name=tensorflow"]})
        for job, selectors in self._selectors.items():
            if isinstance(selectors, str):
                raise ValueError(
                    f"job_to_label_mapping: {job!r:.80} has the selectors {selectors!r:.80}: expected a list of them"
                )
        self._port = tf_server_port
        self._location = executable_location

    def cluster_spec(self) -> ClusterSpec:
        return ClusterSpec(
            {
                job: [address for selector in selectors for address in self._pods(selector)]
                for job, selectors in self._selectors.items()
            }
        )

    def _pods(self, selector: str) -> list[str]:
        try:
            pods = self._client.list_pod_for_all_namespaces(
                label_selector=selector, _request_timeout=_SECONDS
            ).items
        except Exception as error:
            _explain(error, selector)
            raise
        addresses = []
        for pod in sorted(pods, key=operator.attrgetter("metadata.name")):
            if pod.status.phase != "Running":
                raise RuntimeError(
                    f"the pod {pod.metadata.name!r} ({selector!r:.80}) is not running, its phase is "
                    f"{pod.status.phase!r}: wait until all pods run, or narrow the selector"
                )
            addresses.append(f"{pod.status.host_ip}:{self._port}")
        return addresses

    @functools.cached_property
    def _client(self) -> Any:
        from kubernetes import client, config

        configuration = client.Configuration()
        load: Callable[..., Any] = config.load_kube_config
        fix = "set KUBECONFIG, or kubectl config"
        if self._location is KubernetesExecutableLocation.WITHIN_CLUSTER:
            load = config.load_incluster_config
            fix = "outside of a pod, give executable_location=KubernetesExecutableLocation.OFF_CLUSTER"
        try:
            load(client_configuration=configuration)
        except config.ConfigException as error:
            raise RuntimeError(
                f"the Kubernetes API server cannot be asked: {error} ({fix})"
            ) from error
        configuration.retries = _TRIES_AGAIN
        return client.CoreV1Api(client.ApiClient(configuration))


def _explain(error: Exception, selector: str) -> None:
    """Raises: an error that users can act on, from one of the client, or of urllib3, with which it connects."""
    what = f"listing the pods {selector!r:.80} of all namespaces"
    if type(error).__module__.startswith("urllib3."):
        raise UnavailableError(
            f"the Kubernetes API server does not answer to {what}: {error}"
        ) from error
    if (status := getattr(error, "status", None)) is not None:
        fix = "; this account needs the right to list pods in the cluster" if status == 403 else ""
        raise RuntimeError(
            f"the Kubernetes API server refuses {what}: {status} {getattr(error, 'reason', '')}{fix}"
        ) from error
