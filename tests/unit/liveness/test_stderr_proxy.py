"""Words on standard error of other processes."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from mpistrat.liveness.observer.stderr_proxy import StderrProxy
from support.open_files import descriptors


@contextlib.contextmanager
def other(stderr: Any) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that waits, until the block ends."""
    program = [sys.executable, "-c", "print(flush=True); input()"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(program, stdin=pipe, stdout=pipe, stderr=stderr)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_words_go_to_the_first_that_can_be_written() -> None:
    stderr = StderrProxy()
    reader, writer = os.pipe()
    with (
        open("/dev/full", "w") as full,
        other(full) as first,
        other(subprocess.DEVNULL) as second,
        other(writer) as third,
    ):
        os.close(writer)
        assert stderr.say("one\n", [first.pid, second.pid, third.pid])
        assert stderr.say("two\n", [])  # it is still open
    assert os.read(reader, 100) == b"one\ntwo\n"
    stderr.give_back()
    assert os.read(reader, 100) == b""  # nobody holds it any more
    os.close(reader)
    assert not stderr.say("three\n", [third.pid])


def test_words_are_kept_by_who_writes_to_the_same_file(tmp_path: Any) -> None:
    """The launcher writes on behind them: a file opened anew would have had an offset of its own."""
    with open(tmp_path / "log", "w", buffering=1) as file, other(file) as process:
        print("before", file=file)
        stderr = StderrProxy()
        if not stderr.say("words\n", [process.pid]):
            pytest.skip("descriptors of other processes cannot be had here")
        stderr.give_back()
        print("after", file=file)
    assert (tmp_path / "log").read_text() == "before\nwords\nafter\n"


def test_a_socket() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, other(theirs) as process:
        stderr = StderrProxy()
        assert stderr.say("words\n", [process.pid])
        assert ours.recv(100) == b"words\n"
        stderr.give_back()


def test_who_is_gone_leaves_nothing_open() -> None:
    before = descriptors("")
    with other(subprocess.PIPE) as process:
        pass
    assert not StderrProxy().say("words\n", [process.pid])
    assert descriptors("") == before
