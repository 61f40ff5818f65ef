"""What Linux says about another process of the same user: what it does, how it died, what started it."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import operator
import os
import re
import signal
import struct
import zlib
from collections.abc import Iterator

_EXITING = 0x4  # PF_EXITING, <linux/sched.h>
# The fields of `_stat` for a process that is gone: no state, no parent, and it is exiting.
_GONE = ["", *["0"] * 5, str(_EXITING), *["0"] * 43]
RUNS, DEAD = frozenset("RSD"), frozenset(("Z", "X", ""))  # letters of `state_of`
AS_LAUNCHERS_KILL = (signal.SIGKILL, signal.SIGTERM)  # wait statuses; others may kill so, too
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a device or file system (state D)",
    "T": "stopped (state T: SIGSTOP, or a debugger)",
    "t": "stopped by a debugger (state t)",
    "Z": "dead",
    "X": "dead",
}
# What starts ranks: a launcher proper, whose exit code is the job's, or its daemon on a node. Names have 15 characters.
_LAUNCHERS = re.compile(r"(mpiexec|mpirun|mpiexec\.\w+|prterun|orterun)$")
_DAEMONS = re.compile(r"(hydra_pmi_proxy|hydra_bstrap_pr\w*|prted|orted|slurmstepd|flux-shell)$")
_STARTS_RANKS = re.compile(f"{_LAUNCHERS.pattern}|{_DAEMONS.pattern}")


def state_of(pid: int, began: int = 0) -> str:
    """Its letter in /proc/PID/stat; "" when it is gone.

    Args: began: as of `began_at`. A process that began at another time has the number of an ended one. 0: any time.
    """
    fields = _stat(pid)
    return fields[0] if began in (0, int(fields[19])) else ""


def began_at(pid: int) -> int:
    """When the process began, in ticks since the machine's start; an exec changes nothing. 0 when it is gone."""
    return int(_stat(pid)[19])


def signals_of(pid: int, *kinds: str) -> int:
    """A bit for each signal that the process catches (SigCgt), or ignores (SigIgn); 0 when it is gone."""
    lines = rf"(?m)^(?:{'|'.join(kinds)}):\s*(\w+)"
    masks = (int(mask, 16) for mask in re.findall(lines, _read(pid, "status")))
    return functools.reduce(operator.or_, masks, 0)


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal, which would else end it."""
    return bool(signals_of(pid, "SigCgt") >> (number - 1) & 1)


def command_of(pid: int) -> str:
    """The program that it runs, and its arguments."""
    return _read(pid, "cmdline").replace("\0", " ").strip()


def is_exiting(pid: int) -> bool:
    """Whether it is dead, or will be in a moment."""
    return bool(int(_stat(pid)[6]) & _EXITING)


def describe_state(letter: str) -> str:
    return _STATES.get(letter, f"in state {letter}") if letter else "gone"


def cpu_seconds(pid: int) -> float:
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def open_pidfd(pid: int) -> int:
    """A file that becomes readable when the process dies, and once more when it is reaped.

    Raises: ProcessLookupError when it is dead and reaped; another OSError when the kernel has no pidfds (before
        Linux 5.3, as in Red Hat 8) or a container's filter forbids them.
    """
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    # A Python that was built on an older system, as conda's is. The number is the same on all architectures but Alpha.
    return syscall(434, pid, 0)


def syscall(number: int, *arguments: int) -> int:
    """Call the kernel where Python has no function for it. Raises: OSError."""
    result: int = ctypes.CDLL(None, use_errno=True).syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def exit_status(pid: int, pidfd: int | None) -> int | None:
    """The wait status of a dead process that is not our child; None when the kernel does not tell (any more)."""
    fields = _stat(pid)  # while it is a zombie
    if fields[0] in ("Z", "X"):
        return int(fields[-1])
    return None if pidfd is None else _exit_status_of_reaped(pidfd)


def describe_exit(status: int | None) -> str:
    if status is None:
        return "died without a word (killed, or ended by os._exit)"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        hints: dict[int, str] = {
            signal.SIGKILL: ": the kernel does that when memory runs out, MPICH's launcher when a rank closes "
            "descriptors that are not its own (os.closerange), else somebody did",
            signal.SIGSEGV: ": a segmentation fault",
            signal.SIGBUS: ": a bus error, often a full /dev/shm or a truncated file",
        }
        return f"was killed by {name}{hints.get(number, '')}"
    return f"ended with exit code {os.WEXITSTATUS(status)} and without MPI_Finalize, as os._exit() does"


def exit_code(status: int | None) -> int:
    """What a shell would say of a process with this wait status; never 0."""
    if status is None:
        return 1
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status) or 1


def launcher_of(pid: int) -> int | None:
    """The launcher that started it on this node; on other nodes, the last of its daemons."""
    daemon = None
    for ancestor, name in _ancestors(pid):
        if _LAUNCHERS.match(name):
            return ancestor
        if _DAEMONS.match(name) and name != "slurmstepd":  # that one answers to Slurm
            daemon = ancestor
    return daemon


def launched(pid: int) -> tuple[int, int]:
    """The ancestor of the process that a launcher or its daemon has started, and this launcher or daemon.

    The ancestor is 0 where the process itself was started. Both are 0 where no launcher is found.
    """
    child = 0
    for ancestor, name in _ancestors(pid):
        if _STARTS_RANKS.match(name):
            return child, ancestor
        child = ancestor
    return 0, 0


def has_children(pid: int) -> bool:
    """Whether it has child processes, zombies too, other than this process; False where the kernel does not tell."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="utf-8") as children:
                if {*map(int, children.read().split())} - {os.getpid()}:
                    return True
    return False


def is_launcher(pid: int) -> bool:
    """Whether the process is a launcher now: its number may be another's since it ended."""
    return _STARTS_RANKS.match(_name(pid)) is not None


def job_of(pid: int) -> str:
    """A name that the ranks of a job have in common on this node; "" where none is found.

    It is that of their nearest daemon, or launcher, and when it began; and PMIx's name for the job, for a daemon may
    stay for many (`prte` and `prun`). Containers that share /dev/shm may number their processes alike.
    """
    for ancestor, name in _ancestors(pid):
        began = began_at(ancestor)
        if began and _STARTS_RANKS.match(name):
            namespaces = f"{process_namespace()} {_pmix_namespace(pid)}"
            return f"{ancestor}-{began}-{zlib.crc32(namespaces.encode()):08x}"
    return ""


def process_namespace() -> int:
    """What numbers this process: in a container of its own, its pid says nothing to others. 0: not known."""
    with contextlib.suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0


def _pmix_namespace(pid: int) -> str:
    """What the launcher gave the process; it may have taken it out of its own environment since."""
    variables = _read(pid, "environ").split("\0")
    return next((each for each in variables if each.startswith("PMIX_NAMESPACE=")), "")


def _ancestors(pid: int) -> Iterator[tuple[int, str]]:
    """The parent, its parent, and so on, each with its name."""
    while pid > 1:
        pid = int(_stat(pid)[1])
        yield pid, _name(pid)


def _name(pid: int) -> str:
    return _read(pid, "comm").strip()


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on (proc_pid_stat(5) counts it as the third); `_GONE` without it."""
    return _read(pid, "stat").rpartition(")")[2].split() or _GONE


def _read(pid: int, file: str) -> str:
    """A file of the process in /proc; "" when it is gone, or does not show it."""
    path = f"/proc/{pid}/{file}"
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as opened:
        return opened.read()
    return ""


# PIDFD_GET_INFO, <linux/pidfd.h>: since Linux 6.15 it gives the exit status of a process that was reaped.
_INFO_EXIT = 1 << 3
_INFO = struct.Struct("=QQ11Ii")


def _exit_status_of_reaped(pidfd: int) -> int | None:
    request = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
    info = bytearray(_INFO.size)
    _INFO.pack_into(info, 0, _INFO_EXIT, *[0] * 13)
    with contextlib.suppress(OSError):
        fcntl.ioctl(pidfd, request, info, True)
        mask, *_, status = _INFO.unpack(info)
        if mask & _INFO_EXIT:
            return int(status)
    return None
