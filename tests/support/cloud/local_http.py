"""An HTTP server on this machine that answers as a test says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit


class Request(NamedTuple):
    path: str
    query: dict[str, str]
    headers: Mapping[str, str]
    body: bytes


class Answer(NamedTuple):
    status: int
    body: str
    headers: Mapping[str, str] = {}


@contextmanager
def local_http(answer: Callable[[Request], Answer]) -> Iterator[str]:
    """Yields "127.0.0.1:PORT"."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            parameters = parse_qs(url.query)
            query = {name: values[0] for name, values in parameters.items()}
            length = int(self.headers.get("Content-Length") or 0)
            sent = self.rfile.read(length)
            response = answer(Request(url.path, query, dict(self.headers), sent))
            body = response.body.encode()
            self.send_response(response.status)
            for name, value in {**response.headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            pass  # the client has gone

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
