"""A folder on a file system that hangs, as a cluster's does when its server is gone: `python hung_folder.py PATH`.

It is mounted over PATH, with FUSE, until this process ends. It is empty, and works, until somebody looks for a file
named "now" in it; from then on whoever looks for a file, or makes one, waits. Needs root.
"""

import contextlib
import ctypes
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# <linux/fuse.h>
HEADER = struct.Struct("=IIQQIIIHH")
ANSWER = struct.Struct("=IiQ")
LOOKUP = 1
GETATTR = 3
STATFS = 17
INIT = 26
OPENDIR = 27
READDIR = 28
RELEASEDIR = 29
FOLDER = (1, 0, 0, 0, 0, 0, 0, 0, 0, 0o40777, 2, 0, 0, 0, 0, 0)  # inode 1
ANSWERS = {
    # version 7.19, no read-ahead, no flags, no limits, bytes of a write
    INIT: struct.pack("=IIIIHHI", 7, 19, 0, 0, 0, 0, 65536),
    # valid for 3600 s
    GETATTR: struct.pack("=QII", 3600, 0, 0) + struct.pack("=QQQQQQIIIIIIIIII", *FOLDER),
    STATFS: bytes(80),
    OPENDIR: bytes(16),
    READDIR: b"",
    RELEASEDIR: b"",
}
NO_SUCH_FILE = -2
NO_SUCH_REQUEST = -38


def serve(path: str) -> None:
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"hung", path.encode(), b"fuse", 0, options.encode()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    print("mounted", flush=True)
    name = b""
    while name != b"now":
        request = os.read(device, 1 << 17)
        _, kind, number, *_ = HEADER.unpack_from(request)
        name = request[HEADER.size :].rstrip(b"\0")
        answer = ANSWERS.get(kind)
        if answer is not None:
            header = ANSWER.pack(ANSWER.size + len(answer), 0, number)
            os.write(device, header + answer)
        else:
            error = NO_SUCH_FILE if kind == LOOKUP else NO_SUCH_REQUEST
            os.write(device, ANSWER.pack(ANSWER.size, error, number))
    signal.pause()  # who waits can be killed: nobody has begun to answer


@contextlib.contextmanager
def hung_folder(path: Path) -> Iterator[None]:
    """Mounted over `path` in the block."""
    path.mkdir()
    command = [sys.executable, __file__, str(path)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        if server.stdout.readline() != "mounted\n":
            pytest.skip("needs root and FUSE")
        yield
    finally:
        server.kill()  # who waits gets an error then
        server.communicate()
        ctypes.CDLL(None).umount2(str(path).encode(), 2)  # MNT_DETACH


if __name__ == "__main__":
    serve(sys.argv[1])
