"""A resolver for the pods of a Kubernetes cluster that match label selectors."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpistrat.cluster_resolver.cluster_spec import ClusterSpec
from mpistrat.cluster_resolver.listed_tasks import ListedTasksResolver
from mpistrat.errors import UnavailableError

_SECONDS = (5, 15)  # timeouts: to connect, to get the answer
_TRIES_AGAIN = 1


class KubernetesExecutableLocation(enum.Enum):
    """Says where this process runs, and so where it finds its credentials for the API server.

    WITHIN_CLUSTER: in a pod; the process uses the pod's service account.
    OFF_CLUSTER: outside the cluster; the process uses $KUBECONFIG or ~/.kube/config.

    Example, with Kubernetes::

        location = ms.cluster_resolver.KubernetesExecutableLocation.OFF_CLUSTER
        resolver = ms.cluster_resolver.KubernetesClusterResolver(executable_location=location)
    """

    WITHIN_CLUSTER = 0
    OFF_CLUSTER = 1


class KubernetesClusterResolver(ListedTasksResolver):
    """Finds the pods that match label selectors; each is a task. Every call lists them again.

    `task_type` and `task_id` are None until the program sets them, because the list does not say in which pod this
    process runs. `topology()` gets the ranks from MPI.

    Args:
        job_to_label_mapping: a list of label selectors for each job; None is {"worker": ["job-name=tensorflow"]}. A
            job's tasks are the pods of its first selector, sorted by name, then the pods of its next selector.
        tf_server_port: the port of every task's address; the host is the IP address of the pod's node.
        override_client: a kubernetes.client.CoreV1Api to use; None makes one.
        executable_location: where this process runs; it selects the credentials.
    Raises: ImportError without the package kubernetes (extra `kubernetes`); ValueError if `executable_location` or a
        job's selectors have the wrong type. `cluster_spec`, `master` and `topology` raise RuntimeError if a pod is not
        running or pods may not be listed, and UnavailableError if the API server cannot be reached.

    Example, with Kubernetes::

        resolver = ms.cluster_resolver.KubernetesClusterResolver({"worker": ["job-name=train"]})
        print(resolver.cluster_spec(), resolver.master("worker", 0))
        assert resolver.topology().size == resolver.cluster_spec().num_tasks("worker")
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
            self._require("kubernetes", "kubernetes")
        else:
            self._client = override_client
        if not isinstance(executable_location, KubernetesExecutableLocation):
            raise ValueError(
                f"executable_location={executable_location!r:.80} must be a KubernetesExecutableLocation"
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
        tasks: dict[str, list[str]] = {}
        for job, selectors in self._selectors.items():
            tasks[job] = []
            for selector in selectors:
                tasks[job] += self._pods(selector)
        return ClusterSpec(tasks)

    def _pods(self, selector: str) -> list[str]:
        try:
            pods = self._client.list_pod_for_all_namespaces(
                label_selector=selector, _request_timeout=_SECONDS
            ).items
        except Exception as error:
            _explain(error, selector)
            raise
        addresses = []
        for pod in sorted(pods, key=lambda pod: pod.metadata.name):
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
    """Raise an error that says more than `error`, the error of the request for the list of pods.

    Returns if `error` is neither an HTTP error nor urllib3's; the caller then raises `error` itself.
    Raises: UnavailableError if the API server does not answer; RuntimeError if the server has refused.
    """
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
