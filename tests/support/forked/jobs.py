"""Jobs whose ranks are forked: `with job() as address`, and mpiexec starts `rank.py` with that address."""

import atexit
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

RANK = Path(__file__).with_name("rank.py")
_SERVER = RANK.with_name("server.py")
SECONDS_TO_START = 120.0


@dataclass
class _Server:
    """The process that has imported torch, for as long as this one lives."""

    control: socket.socket
    process: subprocess.Popen[bytes]
    folder: Path
    numbers: Iterator[int] = field(default_factory=itertools.count)

    @classmethod
    def start(cls, modules: tuple[str, ...]) -> "_Server":
        ours, its = socket.socketpair()
        control = str(its.fileno())
        command = [sys.executable, str(_SERVER), control, *modules]
        # Threads of BLAS and OpenMP would not live in a fork.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment["PYTHONUNBUFFERED"] = ""  # the ranks' streams are this process's
        process = subprocess.Popen(
            command,
            env=environment,
            pass_fds=[its.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        its.close()
        ours.settimeout(SECONDS_TO_START)
        server = cls(ours, process, Path(tempfile.mkdtemp(prefix="mpistrat-forks-")))
        atexit.register(server.stop)
        if ours.recv(5) != b"ready":
            raise RuntimeError(f"{_SERVER} ended with exit code {process.wait()}")
        return server

    def stop(self) -> None:
        self.control.close()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


_servers: dict[tuple[str, ...], _Server] = {}
_one_at_a_time = threading.Lock()  # of threads that ask for a server, or a server for a daemon
cpu_seconds = 0.0  # of all ranks so far, which are no children of this process


def place(address: str) -> list[str]:
    """What mpiexec starts after `python` and before the program: a client of the daemon that listens at `address`."""
    return ["-I", "-S", str(RANK), address]


@contextmanager
def job(modules: tuple[str, ...] = ()) -> Iterator[str]:
    """A daemon for the ranks of one job; gives the address that it listens at. At the end no rank is left.

    Args:
        modules: what the process that is forked has imported beside torch and mpistrat.
    """
    global cpu_seconds
    with _one_at_a_time:
        ours, address = _daemon(modules)
    with ours:
        try:
            yield address
        finally:
            ours.shutdown(socket.SHUT_WR)
            cpu_seconds += json.loads(ours.recv(64) or b"0")


def _daemon(modules: tuple[str, ...]) -> tuple[socket.socket, str]:
    """Returns: the connection to a new daemon, and the address that it listens at."""
    if modules not in _servers:
        _servers[modules] = _Server.start(modules)
    server = _servers[modules]
    address = str(server.folder / str(next(server.numbers)))
    ours, its = socket.socketpair()
    socket.send_fds(server.control, [address.encode()], [its.fileno()])
    its.close()
    ours.settimeout(SECONDS_TO_START)
    if ours.recv(5) != b"ready":
        raise RuntimeError("the fork server has made no daemon for the job")
    return ours, address
