"""The part of a Kubernetes API server that lists pods, on this machine, and the official client of it.

Speaks https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/#list-all-namespaces
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from support.cloud.local_http import Answer, Request, local_http

# name, IP address of its node, phase
Pod = tuple[str, str, str]


@dataclass
class PodServer:
    """Attributes: pods: by label selector, in the order in which they are listed. May be changed while it runs."""

    pods: Mapping[str, Sequence[Pod]]
    url: str = ""
    asked: list[str] = field(default_factory=list)
    status: int = 200

    def answer(self, request: Request) -> Answer:
        selector = request.query.get("labelSelector", "")
        self.asked.append(f"{request.path}?{selector}")
        if request.path != "/api/v1/pods" or self.status != 200:
            code = self.status if self.status != 200 else 404
            status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code}
            return Answer(code, json.dumps(status), {"Content-Type": "application/json"})
        items = [
            {
                "metadata": {"name": name, "namespace": "default"},
                "spec": {"containers": [{"name": "main"}]},
                "status": {"phase": phase, "hostIP": host, "podIP": "10.244.0.7"},
            }
            for name, host, phase in self.pods.get(selector, ())
        ]
        listed = {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items}
        return Answer(200, json.dumps(listed), {"Content-Type": "application/json"})

    def client(self) -> Any:
        from kubernetes import client

        return client.CoreV1Api(client.ApiClient(client.Configuration(host=self.url)))


@contextmanager
def pod_server(pods: Mapping[str, Sequence[Pod]]) -> Iterator[PodServer]:
    server = PodServer(pods)
    with local_http(server.answer) as host:
        server.url = f"http://{host}"
        yield server
