"""Messages between processes of a node: each process reads one pipe, and the other processes write into it.

The other processes open the pipe's writing end as /proc/PID/fd/N. The pipe has no name and no port, and other users'
processes may not open it. The kernel writes a piece of up to PIPE_BUF bytes whole: it neither mixes the piece with
other writers' pieces nor cuts it off when the writer dies (pipe(7)). A message consists of such pieces. A reader that
waits sleeps in the kernel until a piece arrives.
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

# Before each piece: the writer's rank, the bytes that follow, and whether the piece is the message's last.
_HEADER = struct.Struct("=IHH")
_PIECE = select.PIPE_BUF - _HEADER.size
# Bytes in a pipe: the kernel's limit for a user. The pipe keeps its default of 64 KB if the user has many pipes.
_CAPACITY = 1 << 20
_AT_ONCE = 1 << 18  # bytes of a read


_Received = tuple[int, bytes | bytearray]  # the writer's rank and its message


class PipeAddress(NamedTuple):
    """The writing end of a process's pipe.

    Attributes: inode: the pipe's inode. PipeOutbox compares it, because in another container `pid` may be a different
        process.
    """

    pid: int
    descriptor: int
    inode: int


class PipeInbox:
    """The pipe that this process reads.

    Attributes:
        descriptor: the reading end; poll shows it as readable when a piece has arrived.
        address: the writing end, for the other processes.
    """

    def __init__(self) -> None:
        self.descriptor, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _CAPACITY)
        # The writing end stays open, because the other processes open it through this process.
        self.address = PipeAddress(os.getpid(), writer, os.fstat(writer).st_ino)
        for end in (self.descriptor, writer):
            weakref.finalize(self, os.close, end).atexit = False
        self._rest = b""
        self._begun: dict[int, bytearray] = {}  # by writer

    def read(self, *, everything: bool = False) -> list[_Received]:
        """Return the messages that have arrived whole, as (writer's rank, message), in each writer's order; [] if none.

        Args: everything: True reads until the pipe is empty; False reads once, at most 256 KB, because other processes
            may write all the time.
        """
        found: list[_Received] = []
        while True:
            try:
                data = self._rest + os.read(self.descriptor, _AT_ONCE)
            except BlockingIOError:
                return found
            taken = self._take(data, found)
            self._rest = data[taken:]
            if not everything:
                return found

    def _take(self, data: bytes, found: list[_Received]) -> int:
        """Append to `found` the messages that `data` completes. Returns: the offset of the first incomplete piece."""
        start = 0
        while len(data) - start >= _HEADER.size:
            writer, length, last = _HEADER.unpack_from(data, start)
            begin = start + _HEADER.size
            end = begin + length
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
        """Drop the message that a dead writer has begun and not finished."""
        self._begun.pop(writer, None)


class PipeOutbox:
    """Writes messages to another process's pipe. Called by: one thread at a time.

    Args: writer: this process's rank.
    Attributes: pid: the reader's process id.
    Raises: OSError if this process cannot open the pipe.
    """

    def __init__(self, address: PipeAddress, writer: int) -> None:
        path = f"/proc/{address.pid}/fd/{address.descriptor}"
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
        self.descriptor = os.open(path, flags)
        if os.fstat(self.descriptor).st_ino != address.inode:
            os.close(self.descriptor)
            raise OSError(f"process {address.pid} is another one here, in another container")
        weakref.finalize(self, os.close, self.descriptor).atexit = False
        self.pid = address.pid
        self._writer = writer
        self._unwritten: deque[bytes] = deque()

    def put(self, message: bytes) -> bool:
        """Write as many pieces of a message as the pipe has room for; `flush` writes the rest.

        Never waits. Returns: whether the whole message, and all earlier messages, are written.
        """
        nbytes = len(message)
        for start in range(0, max(nbytes, 1), _PIECE):
            end = start + _PIECE
            piece = message[start:end]
            last = end >= nbytes
            header = _HEADER.pack(self._writer, len(piece), last)
            self._unwritten.append(header + piece)
        return self.flush()

    def flush(self) -> bool:
        """Write as many waiting pieces as the pipe has room for, without waiting.

        Returns: whether no piece is left; True also if the reader has died, and then the pieces are dropped.
        """
        while self._unwritten:
            try:
                os.write(self.descriptor, self._unwritten[0])
            except BlockingIOError:
                return False
            except BrokenPipeError:  # the reader has died; `Channel` notices that
                self._unwritten.clear()
                return True
            self._unwritten.popleft()
        return True
