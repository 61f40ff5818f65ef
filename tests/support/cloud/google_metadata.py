"""A metadata server as Google's virtual machines have one, on this machine.

Speaks https://cloud.google.com/compute/docs/metadata/querying-metadata: only to those who send its header.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from support.cloud.local_http import Answer, Request, local_http

ROOT = "/computeMetadata/v1/"


@dataclass
class MetadataServer:
    """Attributes: values: by path below computeMetadata/v1/. May be changed while it runs."""

    values: Mapping[str, str]
    environ: dict[str, str] = field(default_factory=dict)  # where it is
    asked: list[str] = field(default_factory=list)
    busy: int = 0  # so many requests are answered by 503 before others
    seconds: float = 0.0  # that each answer takes
    wanted: str = "Google"  # the header that requests must have
    flavor: str = "Google"  # the header of its answers

    def answer(self, request: Request) -> Answer:
        path = request.path.removeprefix(ROOT)
        self.asked.append(path)
        time.sleep(self.seconds)
        if request.headers.get("Metadata-Flavor") != self.wanted:
            return self._answer(403, "Forbidden")
        if self.busy > 0:
            self.busy -= 1
            return self._answer(503, "Service Unavailable")
        if not request.path.startswith(ROOT) or path not in self.values:
            return self._answer(404, "Not Found")
        return self._answer(200, self.values[path])

    def _answer(self, status: int, text: str) -> Answer:
        return Answer(status, text, {"Metadata-Flavor": self.flavor})


@contextmanager
def metadata_server(values: Mapping[str, str]) -> Iterator[MetadataServer]:
    server = MetadataServer(values)
    with local_http(server.answer) as host:
        server.environ = {"GCE_METADATA_HOST": host}
        yield server
