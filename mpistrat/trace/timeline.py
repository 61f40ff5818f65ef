"""This process's part of the trace: a file that is written while the program runs, so a killed job leaves its parts.

A part is text, with a JSON value in each line. Facts about many events are written once, as an object: the header (the
first line), kinds of events, tracks (threads), comparisons of clocks, and at the end of a complete part {"end": …}. An
event is an array: [kind, track, start, end], and for a collective [kind, track, entered, together, left, number]. Times
are CLOCK_MONOTONIC in ns.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import warnings
from typing import Any

from mpistrat.machine.private_files import create, make_folder

# Limits on the events in memory that are not written yet: a killed process loses them
EVENTS_TOGETHER = 1000
NANOSECONDS_TOGETHER = 1_000_000_000

HEADER_VERSION = 1


def part_of(folder: str, rank: int) -> str:
    return os.path.join(folder, f"rank-{rank}.part")


def header_of(part: str) -> str:
    """Return the first line of a part; "" if the file does not exist."""
    with contextlib.suppress(OSError), open(part, encoding="utf-8", errors="replace") as file:
        return file.readline().rstrip("\n")
    return ""


class Timeline:
    """This process's part of the trace: it collects events and writes them to a file.

    Any thread may call its methods; in a forked child they do nothing. Events are written 1000 at a time, or when an
    event comes 1 s after the last writing. If writing fails later, the timeline warns, and drops all further events.

    Args:
        folder: the folder of the parts; made if it is missing.
        rank, size: this process's rank and the number of ranks, as the launcher counts them.
        node: the host's name.
        clock: the name of the clock that `now` reads. Processes with the same name need no comparison.

    Raises: OSError if the part cannot be written.
    """

    def __init__(self, folder: str, rank: int, size: int, node: str, clock: str) -> None:
        self.folder = folder
        self.rank = rank
        self.clock = clock
        self.now = time.monotonic_ns
        self.header = json.dumps(
            {
                "trace": HEADER_VERSION,
                "rank": rank,
                "ranks": size,
                "node": node,
                "pid": os.getpid(),
                "clock": clock,
                "begins": self.now(),
                "time": time.time(),
            }
        )
        make_folder(folder)
        self.path = part_of(folder, rank)
        with create(self.path, binary=True) as file:
            self._file: int | None = os.dup(file.fileno())
        # Reentrant, because a signal handler may call a collective while this thread records an event.
        self._lock = threading.RLock()
        self._lines = [self.header]
        self._written_at = self.now()
        self._kinds = 0
        self._tracks: dict[int, int] = {}
        os.register_at_fork(after_in_child=self._forget)
        self._write()

    def kind(self, name: str, category: str, **details: Any) -> int:
        """Return the number of a new kind of events, for `add`. Each call makes another kind.

        Args: name, category, details: shared by all events of the kind, and shown in the trace.
        """
        with self._lock:
            number = self._kinds
            self._kinds += 1
            self._tell({"kind": number, "name": name, "category": category, "told": details})
        return number

    def add(self, kind: int, start: int, end: int) -> None:
        """Record an event of a `kind`: this thread's work from `start` to `end`, both times of `now` (ns)."""
        event = f"[{kind},{self._track()},{start},{end}]"
        self._add(event, end)

    def add_collective(
        self, kind: int, entered: int, together: int, left: int, number: int
    ) -> None:
        """Record a collective, call `number` of its communicator, on this thread. Times are times of `now` (ns).

        Args:
            entered, left: when this rank entered and left the call.
            together: when all ranks had entered the call; 0 if that is not known.
        """
        track = self._track()
        self._add(f"[{kind},{track},{entered},{together},{left},{number}]", left)

    def add_comparison(self, reference: str, at: int, ahead: int, error: int) -> None:
        """Record a comparison of this process's clock with the clock that has the name `reference`.

        Args: at, ahead, error: nanoseconds, as in `clocks.Comparison`.
        """
        line = {"reference": reference, "at": at, "ahead": ahead, "error": error}
        self._add(json.dumps(line), at)

    def flush(self) -> None:
        """Write all events that are still in memory."""
        with self._lock:
            self._write()

    def close(self) -> None:
        """Write all events and the mark of a complete part. Later events are dropped."""
        with self._lock:
            self._tell({"end": self.now()})
            self._write()
            self._stop()

    def _track(self) -> int:
        thread = threading.get_ident()
        track = self._tracks.get(thread)
        if track is None:
            with self._lock:
                track = self._tracks[thread] = len(self._tracks) + 1
                self._tell({"track": track, "name": threading.current_thread().name})
        return track

    def _tell(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._lines.append(json.dumps(line))

    def _add(self, line: str, now: int) -> None:
        with self._lock:
            if self._file is None:
                return
            self._lines.append(line)
            is_time = not 0 <= now - self._written_at < NANOSECONDS_TOGETHER
            if is_time or len(self._lines) >= EVENTS_TOGETHER:
                self._written_at = now
                self._write()

    def _write(self) -> None:
        if self._file is None:
            return
        text = "".join(f"{line}\n" for line in self._lines)
        data = memoryview(text.encode())
        self._lines.clear()
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            self._stop()
            warnings.warn(
                f"rank {self.rank} cannot write to {self.path} any more ({error}): its trace ends here, the program "
                "goes on",
                RuntimeWarning,
                stacklevel=2,
            )

    def _stop(self) -> None:
        file = self._file
        self._file = None
        if file is not None:
            with contextlib.suppress(OSError):
                os.close(file)

    def _forget(self) -> None:
        self._lock = threading.RLock()  # another thread may have held it
        self._lines = []
        self._stop()


def host_clock() -> str:
    """Return a name for this process's CLOCK_MONOTONIC. Processes with the same name read the same clock.

    It is made of the kernel's boot ID and the process's time namespace; without /proc, it is the host's name.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot} {os.stat('/proc/self/ns/time').st_ino}"
    except OSError:
        import socket

        return socket.gethostname()
