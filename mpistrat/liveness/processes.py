"""Facts from Linux about another process of the same user: its state, its exit status, the launcher that started it."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import signal
import struct
import zlib
from collections.abc import Iterator

_EXITING = 0x4  # PF_EXITING, <linux/sched.h>
# The fields of `_stat` for a process that is gone: without a state, without a parent, exiting.
_GONE = ["", *["0"] * 5, str(_EXITING), *["0"] * 43]
# Letters of `state_of`.
RUNS = frozenset("RSD")
DEAD = frozenset(("Z", "X", ""))
AS_LAUNCHERS_KILL = (signal.SIGKILL, signal.SIGTERM)  # wait statuses; other programs may kill alike
_STATES = {
    "": "gone",
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a device or file system (state D)",
    "T": "stopped (state T: SIGSTOP, or a debugger)",
    "t": "stopped by a debugger (state t)",
    "Z": "dead",
    "X": "dead",
}
# The programs that start ranks: a launcher (its exit code is the job's), or the launcher's daemon on a node. The kernel
# cuts names to 15 characters.
_LAUNCHERS = re.compile(r"(mpiexec|mpirun|mpiexec\.\w+|prterun|orterun)$")
_DAEMONS = re.compile(r"(hydra_pmi_proxy|hydra_bstrap_pr\w*|prted|orted|slurmstepd|flux-shell)$")
_STARTS_RANKS = re.compile(f"{_LAUNCHERS.pattern}|{_DAEMONS.pattern}")


def state_of(pid: int, began: int = 0) -> str:
    """Return the letter of the process's state in /proc/PID/stat ("R", "S", …); "" if the process is gone.

    Args: began: the process's start by `began_at`. If it differs, a new process has got the pid of a process that is
        gone. 0: do not compare.
    """
    fields = _stat(pid)
    return fields[0] if began in (0, int(fields[19])) else ""


def began_at(pid: int) -> int:
    """Return when the process began, in clock ticks since the boot; 0 if it is gone. An exec does not change it."""
    return int(_stat(pid)[19])


def signals_of(pid: int, *kinds: str) -> int:
    """Return the process's signals of the given kinds as a mask: bit n-1 stands for signal n.

    Args: kinds: line names of /proc/PID/status: "SigCgt" for signals that it catches, "SigIgn" for ignored signals.
    Returns: 0 if there are no such signals, or the process is gone.
    """
    lines = rf"(?m)^(?:{'|'.join(kinds)}):\s*(\w+)"
    signals = 0
    for mask in re.findall(lines, _read(pid, "status")):
        signals |= int(mask, 16)
    return signals


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal `number`; without one, the signal may end the process."""
    return bool(signals_of(pid, "SigCgt") >> (number - 1) & 1)


def command_of(pid: int) -> str:
    """Return the process's command line, words separated by blanks; "" if the process is gone."""
    return _read(pid, "cmdline").replace("\0", " ").strip()


def is_exiting(pid: int) -> bool:
    """Whether the process is dead, or has begun to exit."""
    return bool(int(_stat(pid)[6]) & _EXITING)


def describe_state(letter: str) -> str:
    return _STATES.get(letter, f"in state {letter}")


def cpu_seconds(pid: int) -> float:
    fields = _stat(pid)
    ticks = int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def open_pidfd(pid: int) -> int:
    """Open a file that becomes readable when the process dies, and again when the process is reaped.

    Returns: the file descriptor, for the caller to close.
    Raises: ProcessLookupError if the process is dead and reaped; another OSError if the kernel has no pidfds (before
        Linux 5.3, as in Red Hat 8), or if a container's filter forbids them.
    """
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    # Python was built on an older system, as conda's is. 434 is pidfd_open on all architectures except Alpha.
    return syscall(434, pid, 0)


def syscall(number: int, *arguments: int) -> int:
    """Make the system call `number`, for calls that Python has no function for.

    Returns: the kernel's result, at least 0.   Raises: OSError if the kernel returns an error.
    """
    result: int = ctypes.CDLL(None, use_errno=True).syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def exit_status(pid: int, pidfd: int | None) -> int | None:
    """Return the status of a dead process as os.wait gives it; the process need not be a child of ours.

    Args: pidfd: a descriptor that `open_pidfd` opened while the process lived; None if there is none.
    Returns: None if the process lives, or was reaped and the kernel (before Linux 6.15) has forgotten the status.
    """
    fields = _stat(pid)  # has the status while the process is a zombie
    if fields[0] in ("Z", "X"):
        return int(fields[-1])
    return None if pidfd is None else _exit_status_of_reaped(pidfd)


def describe_exit(status: int | None) -> str:
    if status is None:
        return "died without a word (killed, or ended by os._exit)"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        hints: dict[int, str] = {
            signal.SIGKILL: ": memory ran out, or somebody killed it, or it closed MPICH's files by os.closerange()",
            signal.SIGSEGV: ": a segmentation fault",
            signal.SIGBUS: ": a bus error, often a full /dev/shm or a truncated file",
        }
        return f"was killed by {name_of_signal(number)}{hints.get(number, '')}"
    return f"ended with exit code {os.WEXITSTATUS(status)} and without MPI_Finalize, as os._exit() does"


def name_of_signal(number: int) -> str:
    """Return the signal's name, such as "SIGKILL"; "signal 40" for a signal without a name."""
    names = {each.value: each.name for each in signal.Signals}
    return names.get(number, f"signal {number}")


def exit_code(status: int | None) -> int:
    """Return the exit code that a shell shows for this wait status (128 + the signal); 1 for status None or code 0."""
    if status is None:
        return 1
    if os.WIFSIGNALED(status):
        return 128 + os.WTERMSIG(status)
    return os.WEXITSTATUS(status) or 1


def launcher_of(pid: int) -> int | None:
    """Return the pid of the launcher (`mpiexec`, `mpirun`, …) that is an ancestor of the process on this node.

    Returns: if the launcher runs on another node, the outermost daemon of the launcher among the ancestors, but not
        Slurm's; None if there is none.
    """
    daemon = None
    for ancestor, name in _ancestors(pid):
        if _LAUNCHERS.match(name):
            return ancestor
        if _DAEMONS.match(name) and name != "slurmstepd":  # slurmstepd belongs to Slurm
            daemon = ancestor
    return daemon


def launched(pid: int) -> tuple[int, int]:
    """Return two pids: a script's, and the launcher's or its daemon's on this node.

    The launcher or daemon is the nearest one among the ancestors of the process `pid`. The script is a child of the
    launcher, and an ancestor of the process.

    Returns: (0, launcher) if the launcher started the process itself; (0, 0) without a launcher.
    """
    child = 0
    for ancestor, name in _ancestors(pid):
        if _STARTS_RANKS.match(name):
            return child, ancestor
        child = ancestor
    return 0, 0


def has_children(pid: int) -> bool:
    """Whether the process has a child, dead or alive, that is not the calling process; False if that is not known."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            children = _read(pid, f"task/{thread}/children").split()
            if {*children} - {str(os.getpid())}:
                return True
    return False


def is_launcher(pid: int) -> bool:
    """Whether the process is a launcher now. After a launcher has ended, another process may get its pid."""
    return _STARTS_RANKS.match(_name(pid)) is not None


def job_of(pid: int) -> str:
    """Return a name for the job that is the same in all its ranks on this node; "" if no launcher is found.

    The name has the pid and the start time of the nearest launcher or daemon among the ancestors of `pid`, and a
    checksum of two namespaces: of PMIx, because a daemon may serve many jobs (`prte` and `prun`), and of pids, because
    containers that share /dev/shm may number their processes alike.
    """
    for ancestor, name in _ancestors(pid):
        began = began_at(ancestor)
        if began and _STARTS_RANKS.match(name):
            namespaces = f"{process_namespace()} {_pmix_namespace(pid)}"
            return f"{ancestor}-{began}-{zlib.crc32(namespaces.encode()):08x}"
    return ""


def process_namespace() -> int:
    """Return the inode of this process's pid namespace; 0 if not known. Pids mean nothing in another namespace."""
    with contextlib.suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0


def _pmix_namespace(pid: int) -> str:
    """Return "PMIX_NAMESPACE=…" of the environment that the process was started with; "" without this variable.

    The process may since have removed the variable from its environment; the result is the same.
    """
    variables = re.findall(r"(?:^|\0)(PMIX_NAMESPACE=[^\0]*)", _read(pid, "environ"))
    return "".join(variables[:1])


def _ancestors(pid: int) -> Iterator[tuple[int, str]]:
    """Yield pid and program name of the process's parent, of the parent's parent, and so on."""
    while pid > 1:
        pid = int(_stat(pid)[1])
        yield pid, _name(pid)


def _name(pid: int) -> str:
    return _read(pid, "comm").strip()


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat without the first two (pid, name); `_GONE` if the process is gone."""
    return _read(pid, "stat").rpartition(")")[2].split() or _GONE


def _read(pid: int, file: str) -> str:
    """Return the text of /proc/PID/FILE; "" if the process is gone, or hides the file."""
    return text_in(f"/proc/{pid}/{file}")


def text_in(path: str) -> str:
    """Return the text of the file `path`; "" if it cannot be read. Bytes that are no UTF-8 become U+FFFD."""
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
    return ""


# For PIDFD_GET_INFO, <linux/pidfd.h>: since Linux 6.15 it returns the exit status of a process that was reaped.
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
