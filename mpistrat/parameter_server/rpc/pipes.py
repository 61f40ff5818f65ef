"""Messages between processes of a node: each process reads one pipe, into which the others write.

The others open the writing end as /proc/PID/fd/N. It has no name and no port, and other users' processes may not open
it. A piece of up to PIPE_BUF bytes is written whole: it is neither mixed with other writers' pieces nor cut off by the
writer's death (pipe(7)). A message consists of such pieces. A reader that waits sleeps in the kernel until one is
written.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import weakref
from collections import deque
from typing import NamedTuple

# Before each piece: its writer, how many bytes follow, and whether they are the message's last.
_HEADER = struct.Struct("=IHH")
_PIECE = select.PIPE_BUF - _HEADER.size
# The kernel's limit for a user's pipe. A user with many pipes gets 64 KB.
_CAPACITY = 1 << 20
_AT_ONCE = 1 << 18  # bytes of a read


class PipeAddress(NamedTuple):
    """The writing end of a process's pipe."""

    pid: int
    descriptor: int
    inode: int  # in another container, PID may be another process


class PipeInbox:
    """The pipe that this process reads.

    Attributes:
        descriptor: readable when there is something to read.
        address: where the others write.
    """

    def __init__(self) -> None:
        self.descriptor, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _CAPACITY)
        # The writing end stays open: the others open it through this process.
        self.address = PipeAddress(os.getpid(), writer, os.fstat(writer).st_ino)
        for end in (self.descriptor, writer):
            weakref.finalize(self, os.close, end).atexit = False
        self._rest = b""
        self._begun: dict[int, bytearray] = {}  # by writer

    def read(self, *, everything: bool = False) -> list[tuple[int, bytes | bytearray]]:
        """The messages that have come, as (writer, message); those of one writer in its order.

        Args: everything: read until the pipe is empty. Otherwise read once, since others may write all the time.
        """
        found: list[tuple[int, bytes | bytearray]] = []
        while True:
            try:
                data = self._rest + os.read(self.descriptor, _AT_ONCE)
            except BlockingIOError:
                return found
            self._rest = data[self._take(data, found) :]
            if not everything:
                return found

    def _take(self, data: bytes, found: list[tuple[int, bytes | bytearray]]) -> int:
        """Add the messages that `data` completes. Returns: where the first piece begins that is not whole."""
        start = 0
        while len(data) - start >= _HEADER.size:
            writer, length, last = _HEADER.unpack_from(data, start)
            begin, end = start + _HEADER.size, start + _HEADER.size + length
            if end > len(data):
                break
            start = end
            if last and writer not in self._begun:
                found.append((writer, data[begin:end]))
                continue
            begun = self._begun.setdefault(writer, bytearray())
            begun += memoryview(data)[begin:end]
            if last:
                found.append((writer, self._begun.pop(writer)))
        return start

    def forget(self, writer: int) -> None:
        """Drop the message that a dead writer had begun."""
        self._begun.pop(writer, None)


class PipeOutbox:
    """The writing end of another process's pipe. One thread at a time.

    Attributes: pid: the reader's process id.
    Raises: OSError: this process cannot open it.
    """

    def __init__(self, address: PipeAddress, writer: int) -> None:
        path = f"/proc/{address.pid}/fd/{address.descriptor}"
        self.descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if os.fstat(self.descriptor).st_ino != address.inode:
            os.close(self.descriptor)
            raise OSError(f"process {address.pid} is another one here")
        weakref.finalize(self, os.close, self.descriptor).atexit = False
        self.pid, self._writer = address.pid, writer
        self._unwritten: deque[bytes] = deque()

    def put(self, message: bytes) -> bool:
        """Write as many pieces as fit; `flush` writes the rest. Returns: whether all fitted."""
        for start in range(0, max(len(message), 1), _PIECE):
            piece = message[start : start + _PIECE]
            last = start + _PIECE >= len(message)
            self._unwritten.append(_HEADER.pack(self._writer, len(piece), last) + piece)
        return self.flush()

    def flush(self) -> bool:
        """Write what fits of the rest. Returns: whether nothing is left."""
        while self._unwritten:
            try:
                os.write(self.descriptor, self._unwritten[0])
            except BlockingIOError:
                return False
            except BrokenPipeError:  # the reader has died, which `Channel` sees by its pidfd
                self._unwritten.clear()
                return True
            self._unwritten.popleft()
        return True
