"""`python -I -S rank.py SOCKET program…`: started by mpiexec, in the place of a rank that the daemon forks.

Imports as little as it can.
"""

import contextlib
import json
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def main() -> int:
    address, *program = sys.argv[1:]
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(address)
    # The standard streams, and the pipe by which MPICH's ranks speak with their launcher.
    files = [0, 1, 2]
    if "PMI_FD" in os.environ:
        files.append(int(os.environ["PMI_FD"]))
    request = {
        "program": program,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "files": files,
    }
    text = json.dumps(request).encode()
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    socket.send_fds(connection, [len(text).to_bytes(8, "little")], files)
    connection.sendall(text)
    rank = int.from_bytes(_receive(connection), "little")
    for number in FORWARDED:
        signal.signal(number, lambda number, _: _pass_on(number, rank))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    status = int.from_bytes(_receive(connection), "little")
    if os.WIFSIGNALED(status):
        ended_by = os.WTERMSIG(status)
        if ended_by != signal.SIGKILL:
            signal.signal(ended_by, signal.SIG_DFL)
        os.kill(os.getpid(), ended_by)
    return os.waitstatus_to_exitcode(status)


def _pass_on(number: int, rank: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
        os.kill(rank, number)


def _receive(connection: socket.socket) -> bytes:
    """Eight bytes. A daemon that was killed took the rank along."""
    received = b""
    while len(received) < 8:
        more = connection.recv(8 - len(received))
        if not more:
            os.kill(os.getpid(), signal.SIGKILL)
        received += more
    return received


if __name__ == "__main__":
    os._exit(main())
