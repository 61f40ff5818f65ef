"""Messages through pipes: whole and in order, whoever else writes, however slow the reader, whoever is killed."""

import gc
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mpistrat.parameter_server.rpc.pipes import PipeAddress, PipeInbox, PipeOutbox
from support.open_files import descriptors

PIECE = select.PIPE_BUF - 8

# Writes `count` messages of `size` bytes each; with `pieces`, only so many pieces of the last one, and waits.
WRITER = """
import os, sys, time
from mpistrat.parameter_server.rpc.pipes import PipeAddress, PipeOutbox

pid, descriptor, inode, writer, size, count, pieces = map(int, sys.argv[1:])
outbox = PipeOutbox(PipeAddress(pid, descriptor, inode), writer)
for number in range(count):
    whole = outbox.put(bytes([number % 256]) * (size + number))
    while not whole:
        time.sleep(0.0005)
        whole = outbox.flush()
if pieces:
    write = os.write

    def some(*arguments):
        global pieces
        if not pieces:
            raise BlockingIOError
        pieces -= 1
        return write(*arguments)

    os.write = some
    assert not outbox.put(b"x" * 1_000_000)
    print("begun", flush=True)
    time.sleep(600)
"""


@contextmanager
def writer(
    inbox: PipeInbox, number: int, size: int, count: int, pieces: int = 0
) -> Iterator[subprocess.Popen[str]]:
    numbers = (*inbox.address, number, size, count, pieces)
    command = [sys.executable, "-c", WRITER, *map(str, numbers)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def messages(inbox: PipeInbox, count: int, pause: float = 0) -> list[tuple[int, bytes]]:
    """The next `count` of them."""
    found: list[tuple[int, bytes]] = []
    end = time.monotonic() + 45
    while len(found) < count:
        assert time.monotonic() < end, f"{len(found)} of {count} came"
        select.select([inbox.descriptor], [], [], 1)
        found += [(number, bytes(data)) for number, data in inbox.read()]
        time.sleep(pause)
    return found


def test_messages_of_every_size() -> None:
    inbox = PipeInbox()
    outbox = PipeOutbox(inbox.address, 7)
    sizes = [0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 2 * PIECE + 1, 100_000]
    sent = [os.urandom(size) for size in sizes]
    for message in sent:
        assert outbox.put(message)
    assert messages(inbox, len(sent)) == [(7, message) for message in sent]
    assert inbox.read() == []


@pytest.mark.parametrize("size", [100, 3 * PIECE])
def test_several_processes_write_at_once(size: int) -> None:
    inbox, count = PipeInbox(), 300
    with writer(inbox, 0, size, count), writer(inbox, 1, size, count), writer(inbox, 2, 1, count):
        found = messages(inbox, 3 * count)
    for number in range(3):
        first = 1 if number == 2 else size
        expected = [bytes([n % 256]) * (first + n) for n in range(count)]
        assert [data for sender, data in found if sender == number] == expected


def test_a_message_larger_than_the_pipe_waits_for_its_reader() -> None:
    inbox = PipeInbox()
    outbox = PipeOutbox(inbox.address, 3)
    large = os.urandom(5 << 20)
    assert not outbox.put(large)
    assert not outbox.put(b"after it")
    found: list[tuple[int, bytes]] = []
    while len(found) < 2:
        found += [(number, bytes(data)) for number, data in inbox.read()]
        outbox.flush()
    assert found == [(3, large), (3, b"after it")]
    assert outbox.flush()


def test_a_slow_reader_of_several_large_messages() -> None:
    inbox = PipeInbox()
    size, count = 2_000_000, 3
    with writer(inbox, 0, size, count), writer(inbox, 1, size, count):
        found = messages(inbox, 2 * count, pause=0.002)
    for number in range(2):
        lengths = [len(data) for sender, data in found if sender == number]
        assert lengths == [size + n for n in range(count)]


def test_a_writer_killed_within_a_message() -> None:
    inbox = PipeInbox()
    mine = PipeOutbox(inbox.address, 9)
    with writer(inbox, 1, 10, 2, pieces=5) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
    mine.put(b"a" * (2 * PIECE))
    mine.put(b"b")
    found = messages(inbox, 4)
    assert [(number, len(data)) for number, data in found] == [
        (1, 10),
        (1, 11),
        (9, 2 * PIECE),
        (9, 1),
    ]
    assert inbox.read() == []


def test_everything_that_is_there() -> None:
    inbox = PipeInbox()
    outbox = PipeOutbox(inbox.address, 0)
    sent = 0
    while outbox.put(bytes(4000)):
        sent += 1
    some = len(inbox.read())
    assert 0 < some < sent
    assert outbox.flush()
    assert some + len(inbox.read(everything=True)) == sent + 1


def test_a_reader_that_has_died_is_no_error() -> None:
    inbox = PipeInbox()
    outbox = PipeOutbox(inbox.address, 0)
    del inbox
    gc.collect()
    assert outbox.put(bytes(3 * PIECE))
    assert outbox.flush()


def test_another_process_under_the_number() -> None:
    inbox = PipeInbox()
    address = inbox.address
    before = descriptors("pipe:")
    with pytest.raises(OSError, match="is another one here"):
        PipeOutbox(PipeAddress(address.pid, address.descriptor, address.inode + 1), 0)
    with pytest.raises(OSError, match="No such file"):
        PipeOutbox(PipeAddress(address.pid, 1 << 20, address.inode), 0)
    assert descriptors("pipe:") == before


def test_descriptors_are_closed() -> None:
    gc.collect()
    before = descriptors("pipe:")
    inbox = PipeInbox()
    outbox = PipeOutbox(inbox.address, 0)
    assert descriptors("pipe:") == before + 3
    del inbox, outbox
    gc.collect()
    assert descriptors("pipe:") == before
