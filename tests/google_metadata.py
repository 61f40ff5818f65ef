"""A metadata server as Google's virtual machines have one, on this machine.

Speaks https://cloud.google.com/compute/docs/metadata/querying-metadata: only to those who send its header.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ROOT = "/computeMetadata/v1/"


@dataclass
class MetadataServer:
    """Attributes: values: by path below computeMetadata/v1/. May be changed while it runs."""

    values: Mapping[str, str]
    environ: dict[str, str] = field(default_factory=dict)  # where it is
    asked: list[str] = field(default_factory=list)
    busy: int = 0  # so many requests are answered by 503 before others
    seconds: float = 0.0  # that each answer takes
    flavor: str = "Google"  # the header of its answers


@contextmanager
def metadata_server(values: Mapping[str, str]) -> Iterator[MetadataServer]:
    state = MetadataServer(values)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.removeprefix(ROOT)
            state.asked.append(path)
            time.sleep(state.seconds)
            if self.headers.get("Metadata-Flavor") != "Google":
                self._answer(403, "Forbidden")
            elif state.busy > 0:
                state.busy -= 1
                self._answer(503, "Service Unavailable")
            elif not self.path.startswith(ROOT) or path not in state.values:
                self._answer(404, "Not Found")
            else:
                self._answer(200, state.values[path])

        def _answer(self, status: int, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Metadata-Flavor", state.flavor)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        state.environ = {"GCE_METADATA_HOST": f"127.0.0.1:{server.server_port}"}
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield state
        finally:
            server.shutdown()
