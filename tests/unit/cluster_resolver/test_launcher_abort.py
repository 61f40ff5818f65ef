"""What stands where the launcher's descriptor was is the program's own; tests/launch ends jobs by the launcher."""

import socket
from pathlib import Path

import pytest

from mpistrat.cluster_resolver.launcher_abort import abort_by_launcher


def test_a_file_of_the_program_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "data"
    with path.open("wb", buffering=0) as file:
        monkeypatch.setenv("PMI_FD", str(file.fileno()))
        abort_by_launcher(1)
    assert path.read_bytes() == b""


def test_a_socket_of_the_program_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose other end is no process that has started this one."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        monkeypatch.setenv("PMI_FD", str(ours.fileno()))
        abort_by_launcher(1)
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(100)
