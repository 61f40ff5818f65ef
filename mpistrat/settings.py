"""Every MPISTRAT_* variable: what it means, and how it is read. No other module reads one.

`SETTINGS` is the table; docs/settings.md is made from it. A row is called to be read: `stall_seconds()` is a number.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from mpistrat.errors import TopologyError

T = TypeVar("T")


@dataclass(frozen=True)
class Setting(Generic[T]):
    """One variable of the environment.

    Attributes:
        name: of the variable.
        default: the text that counts where the variable is not set.
        unit: what the text is: "seconds", "a folder", ….
        read_by: who reads it, and when.
        meaning: one sentence for users.
        parse: the value of a text; a ValueError says that the text has none.
        expected: what an error message asks for.
        internal: whether the package sets it for itself; users do not.
    """

    name: str
    default: str
    unit: str
    read_by: str
    meaning: str
    parse: Callable[[str], T]
    expected: str = ""
    internal: bool = False

    def __call__(self, environ: Mapping[str, str] = os.environ) -> T:
        """The value in `environ`, or in os.environ. Raises: TopologyError when the text has none."""
        text = environ.get(self.name, self.default)
        try:
            return self.parse(text)
        except ValueError:
            raise TopologyError(f"{self.name}={text!r:.80}: expected {self.expected}") from None

    def is_set(self) -> bool:
        """Whether the user has chosen the value, also where it is the default one."""
        return self.name in os.environ


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < threading.TIMEOUT_MAX:
        raise ValueError
    return seconds


def _bytes_of_megabytes(text: str) -> float:
    megabytes = float(text)
    if not megabytes >= 0:
        raise ValueError
    return megabytes * 1e6


def _is_raise(text: str) -> bool:
    return ("end", "raise").index(text) == 1


def _folder(text: str) -> str | None:
    return os.path.abspath(text) if text else None


start_seconds = Setting(
    name="MPISTRAT_START_SECONDS",
    default="300",
    unit="seconds",
    read_by="each rank, when it starts MPI and when it builds a strategy",
    meaning="How long a rank waits at the start for the others before it ends the job; 0 waits for ever. "
    "If a rank of their node has ended, the ranks wait no longer: the job ends, and names it.",
    parse=_seconds,
    expected="a number of seconds; 0 waits for ever",
)
stall_seconds = Setting(
    name="MPISTRAT_STALL_SECONDS",
    default="60",
    unit="seconds",
    read_by="each rank, when it builds a strategy, and when `mpistrat run` starts it",
    meaning="How long a collective may last, transfers included; 0 waits for ever. Not set: a group of "
    "`torch.distributed` that has a longer `timeout` waits as long as that.",
    parse=_seconds,
    expected="a number of seconds; 0 waits for ever",
)
raises_on_stall = Setting(
    name="MPISTRAT_ON_STALL",
    default="end",
    unit="`end` or `raise`",
    read_by="each rank, when it builds a strategy, and when `mpistrat run` starts it",
    meaning="What follows when a collective lasts too long: `end` ends the job; `raise` raises "
    "`mpistrat.errors.StallError` on the ranks that wait.",
    parse=_is_raise,
    expected="end or raise",
)
full_tracebacks = Setting(
    name="MPISTRAT_TRACEBACK",
    default="program",
    unit="`program` or `full`",
    read_by="each rank, when an error ends the job",
    meaning="What is shown of the error that ends a job: `full` has the frames of mpistrat and torch's loaders.",
    parse="full".__eq__,
)
shared_bytes = Setting(
    name="MPISTRAT_SHARED_MB",
    default="inf",
    unit="megabytes (10^6 bytes)",
    read_by="each rank, when it builds a strategy",
    meaning="The most memory that a rank shares with the others of its node; with 0, everything goes through MPI.",
    parse=_bytes_of_megabytes,
    expected="megabytes of shared memory for a rank; 0 shares none",
)
_cache = Setting(
    name="MPISTRAT_CACHE",
    default="",
    unit="a folder, or `off`",
    read_by="rank 0, when it builds a strategy",
    meaning="Where measurements are kept from one job to the next; `off` keeps none. Not set: `mpistrat` in "
    "`XDG_CACHE_HOME`, or in `~/.cache`.",
    parse=str,
)
_trace = Setting(
    name="MPISTRAT_TRACE",
    default="",
    unit="a folder",
    read_by="rank 0, when it builds a strategy; its folder holds for all ranks",
    meaning="Where one timeline of all ranks is written. Not set: nothing is traced.",
    parse=_folder,
)
rank_pid = Setting(
    name="MPISTRAT_RANK_PID",
    default="",
    unit="a process id",
    read_by="the processes that a rank starts",
    meaning="The process of the rank, which sets it; a worker process that would start MPI then knows that it is none.",
    parse=str,
    internal=True,
)

SETTINGS: tuple[Setting[Any], ...] = (
    *(start_seconds, stall_seconds, raises_on_stall, full_tracebacks, shared_bytes),
    *(_cache, _trace, rank_pid),
)

USERS_CACHE = "XDG_CACHE_HOME"  # "/home/ann/.cache"; the standard has a relative one ignored


def cache_folder(environ: Mapping[str, str] = os.environ) -> str | None:
    """The folder of measurements, which need not exist. None: nothing is kept; the user says so, or has no home."""
    if folder := _cache(environ):
        return None if folder.lower() == "off" else os.path.abspath(folder)
    users = environ.get(USERS_CACHE, "")
    if not os.path.isabs(users):
        home = environ.get("HOME") or os.path.expanduser("~")
        users = os.path.join(home, ".cache")
    return os.path.join(users, "mpistrat") if os.path.isabs(users) else None


_traced_to: str | None = None


def trace_folder(environ: MutableMapping[str, str] = os.environ) -> str | None:
    """The folder of the trace, as an absolute path; None where nothing is to be traced.

    The setting is remembered, and leaves the environment: a program that this one starts would take itself for a rank
    of the job, and write to the same files.
    """
    global _traced_to
    _traced_to = _trace(environ) or _traced_to
    environ.pop(_trace.name, None)
    return _traced_to


# UCX_TLS=tcp, FI_PROVIDER=cxi, OMPI_MCA_pml=ob1, MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM=ring
MPI_TRANSPORTS = (
    *("UCX_", "FI_", "PSM2_", "PSM3_", "MPICH_", "MPIR_CVAR_", "I_MPI_"),
    *(f"OMPI_MCA_{part}" for part in ("pml", "btl", "mtl", "coll")),
)
# Hydra names the node here, which differs from job to job.
_OF_THE_JOB = "HOSTNAME"


def transport_settings(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What the user has set for MPI about how to move bytes."""
    return {
        name: environ[name]
        for name in sorted(environ)
        if name.startswith(MPI_TRANSPORTS) and not name.endswith(_OF_THE_JOB)
    }
