"""The part of Google's Compute Engine API that lists instance groups, on this machine.

Speaks https://cloud.google.com/compute/docs/reference/rest/v1/instanceGroups/listInstances and …/instances/get
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from support.cloud.local_http import Answer, Request, local_http

ZONE = "/compute/v1/projects/some-project/zones/us-west1-a/"
GROUP = f"{ZONE}instanceGroups/some-group/listInstances"
PLACE = {"project": "some-project", "zone": "us-west1-a", "instance_group": "some-group"}


@dataclass
class ComputeEngine:
    """Attributes: instances: IP addresses of the network interfaces, by name. May be changed while it runs."""

    instances: Mapping[str, list[str]]
    page: int = 2  # instances in a page of the list
    stopped: frozenset[str] = frozenset()
    endpoint: str = ""
    asked: list[str] = field(default_factory=list)
    busy: int = 0  # so many requests are answered by 503 before others

    def answer(self, request: Request) -> Answer:
        self.asked.append(request.path.removeprefix(ZONE))
        if self.busy > 0:
            self.busy -= 1
            return _json(503, {"error": {"code": 503, "message": "Service unavailable"}})
        if request.path == GROUP:
            return _json(200, self._group(request))
        name = request.path.removeprefix(f"{ZONE}instances/")
        if name not in self.instances:
            message = f"The resource {request.path!r} was not found"
            return _json(404, {"error": {"code": 404, "message": message}})
        networks = [{"networkIP": address} for address in self.instances[name]]
        return _json(200, {"name": name, "status": "RUNNING", "networkInterfaces": networks})

    def client_arguments(self) -> dict[str, Any]:
        """What has the official client ask this server, as nobody in particular."""
        from google.auth.credentials import AnonymousCredentials

        endpoint = {"api_endpoint": self.endpoint}
        return {"credentials": AnonymousCredentials(), "client_options": endpoint}

    def _group(self, request: Request) -> dict[str, Any]:
        wanted = json.loads(request.body or b"{}").get("instanceState", "ALL")
        names = list(self.instances)
        if wanted == "RUNNING":
            names = [name for name in names if name not in self.stopped]
        first = int(request.query.get("pageToken") or 0)
        shown = names[first : first + self.page]
        listed: dict[str, Any] = {"kind": "compute#instanceGroupsListInstances"}
        if shown:  # an empty list is left out
            url = f"https://www.googleapis.com{ZONE}instances/"
            listed["items"] = [{"instance": url + name, "status": "RUNNING"} for name in shown]
        if first + self.page < len(names):
            listed["nextPageToken"] = str(first + self.page)
        return listed


def _json(status: int, value: dict[str, Any]) -> Answer:
    return Answer(status, json.dumps(value), {"Content-Type": "application/json"})


@contextmanager
def compute_engine(instances: Mapping[str, list[str]]) -> Iterator[ComputeEngine]:
    server = ComputeEngine(instances)
    with local_http(server.answer) as host:
        server.endpoint = f"http://{host}"
        yield server
