"""The MPISTRAT_* environment variables: their meaning, and how they are read. No other module reads them.

The page docs/settings.md is made from the table `SETTINGS`. Call a setting to read its variable, such as
`stall_seconds()`: it returns a number.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from mpistrat.errors import TopologyError

T = TypeVar("T")
Environment = Mapping[str, str]  # variables by name, as in `os.environ`


@dataclass(frozen=True)
class Setting(Generic[T]):
    """One environment variable. Call the setting to read the variable and parse its text.

    Attributes:
        name: the variable's name, such as "MPISTRAT_STALL_SECONDS".
        default: the text that is parsed if the variable is not set.
        unit: the kind of text that users give: "seconds", "a folder", ….
        read_by: the processes that read the variable, and when.
        meaning: the variable's meaning, for users, in full sentences.
        parse: converts a text to the setting's value; raises ValueError if the text is no valid value.
        expected: a description of valid values, for the error message; "" if all texts are valid.
        internal: True if only the package itself sets the variable, and users must not set it.
    """

    name: str
    default: str
    unit: str
    read_by: str
    meaning: str
    parse: Callable[[str], T]
    expected: str = ""
    internal: bool = False

    def __call__(self, environ: Environment = os.environ) -> T:
        """Return the parsed value of the variable in `environ`, or of `default` if the variable is not set there.

        Raises: TopologyError if the text is no valid value.
        """
        text = environ.get(self.name, self.default)
        try:
            return self.parse(text)
        except ValueError:
            raise TopologyError(f"{self.name}={text!r:.80}: expected {self.expected}") from None

    def is_set(self) -> bool:
        """Whether os.environ has the variable, even if its text equals the default."""
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


def _action(text: str) -> str:
    if text not in ("tell", "raise", "off"):
        raise ValueError
    return text


def _folder(text: str) -> str | None:
    return os.path.abspath(text) if text else None


start_seconds = Setting(
    name="MPISTRAT_START_SECONDS",
    default="300",
    unit="seconds",
    read_by="each rank, when it starts MPI and when it builds a strategy",
    meaning="How long a rank waits at the start for the other ranks before it ends the job; 0 waits for ever. "
    "If a rank of the same node has ended, the job ends sooner, and a message names the rank that has ended.",
    parse=_seconds,
    expected="a number of seconds; 0 waits for ever",
)
stall_seconds = Setting(
    name="MPISTRAT_STALL_SECONDS",
    default="60",
    unit="seconds",
    read_by="each rank, when it builds a strategy, and when `mpistrat run` starts it",
    meaning="How long a collective may last, transfers included; 0 waits for ever. If the variable is not set, the "
    "limit of a group of `torch.distributed` is its own `timeout`.",
    parse=_seconds,
    expected="a number of seconds; 0 waits for ever",
)
raises_on_stall = Setting(
    name="MPISTRAT_ON_STALL",
    default="end",
    unit="`end` or `raise`",
    read_by="each rank, when it builds a strategy, and when `mpistrat run` starts it",
    meaning="The action when a collective lasts too long: `end` ends the job; `raise` raises "
    "`mpistrat.errors.StallError` on the ranks that wait.",
    parse=_is_raise,
    expected="end or raise",
)
on_drift = Setting(
    name="MPISTRAT_ON_DRIFT",
    default="tell",
    unit="`tell`, `raise` or `off`",
    read_by="rank 0, when ranks mirror their first module, and at each save",
    meaning="The action when values that should be equal on all ranks have [drifted apart](divergence.md): `tell` "
    "prints a notice, once; `raise` raises `mpistrat.errors.DivergenceError` on all ranks; `off` compares nothing.",
    parse=_action,
    expected="tell, raise or off",
)
full_tracebacks = Setting(
    name="MPISTRAT_TRACEBACK",
    default="program",
    unit="`program` or `full`",
    read_by="each rank, when an error ends the job",
    meaning="The traceback of the error that ends a job: `full` keeps the frames of mpistrat and of torch's loaders.",
    parse="full".__eq__,
)
shared_bytes = Setting(
    name="MPISTRAT_SHARED_MB",
    default="inf",
    unit="megabytes (10^6 bytes)",
    read_by="each rank, when it builds a strategy",
    meaning="The most memory that a rank shares with the other ranks of its node; with 0, all data goes through MPI.",
    parse=_bytes_of_megabytes,
    expected="megabytes of shared memory for a rank; 0 shares none",
)
_cache = Setting(
    name="MPISTRAT_CACHE",
    default="",
    unit="a folder, or `off`",
    read_by="rank 0, when it builds a strategy",
    meaning="The folder that keeps measurements from one job to the next; `off` keeps none. If the variable is not "
    "set, the folder is `mpistrat` in `XDG_CACHE_HOME`, or else in `~/.cache`.",
    parse=str,
)
_trace = Setting(
    name="MPISTRAT_TRACE",
    default="",
    unit="a folder",
    read_by="rank 0, when it builds a strategy; all ranks use rank 0's folder",
    meaning="The folder in which one timeline of all ranks is written. If the variable is not set, nothing is traced.",
    parse=_folder,
)
rank_pid = Setting(
    name="MPISTRAT_RANK_PID",
    default="",
    unit="a process id",
    read_by="the processes that a rank starts",
    meaning="The rank's process id. The rank sets it; a worker process that would start MPI learns that it is no rank.",
    parse=str,
    internal=True,
)

SETTINGS: tuple[Setting[Any], ...] = (
    start_seconds,
    stall_seconds,
    raises_on_stall,
    on_drift,
    full_tracebacks,
    shared_bytes,
    _cache,
    _trace,
    rank_pid,
)

# "/home/ann/.cache"; the XDG standard says to ignore a relative path.
USERS_CACHE = "XDG_CACHE_HOME"


def cache_folder(environ: Environment = os.environ) -> str | None:
    """Return the absolute path of the folder that keeps measurements of transports for later jobs. It need not exist.

    Returns: None if MPISTRAT_CACHE is "off", or if the user has no home folder: then nothing is kept.
    """
    if folder := _cache(environ):
        return None if folder.lower() == "off" else os.path.abspath(folder)
    users = environ.get(USERS_CACHE, "")
    if not os.path.isabs(users):
        home = environ.get("HOME") or os.path.expanduser("~")
        users = os.path.join(home, ".cache")
    return os.path.join(users, "mpistrat") if os.path.isabs(users) else None


_traced_to: str | None = None


def trace_folder(environ: MutableMapping[str, str] = os.environ) -> str | None:
    """Return the absolute path of the folder for the job's timeline; None if nothing is to be traced.

    The function removes MPISTRAT_TRACE from `environ`, and remembers its value for later calls. Otherwise a program
    that this process starts would read the variable, too, and write to the same files.
    """
    global _traced_to
    _traced_to = _trace(environ) or _traced_to
    environ.pop(_trace.name, None)
    return _traced_to


# UCX_TLS=tcp, FI_PROVIDER=cxi, OMPI_MCA_pml=ob1, MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM=ring
MPI_TRANSPORTS = (
    "UCX_",
    "FI_",
    "PSM2_",
    "PSM3_",
    "MPICH_",
    "MPIR_CVAR_",
    "I_MPI_",
    "OMPI_MCA_pml",
    "OMPI_MCA_btl",
    "OMPI_MCA_mtl",
    "OMPI_MCA_coll",
)
# Hydra sets MPIR_CVAR_…_HOSTNAME to the node's name, so these variables differ from job to job.
_OF_THE_JOB = "HOSTNAME"


def transport_settings(environ: Environment = os.environ) -> dict[str, str]:
    """Return the variables in `environ` that choose how MPI moves bytes, from name to text, sorted by name.

    Called by: the measurement of transports, because a stored result counts only for equal variables.
    """
    return {
        name: environ[name]
        for name in sorted(environ)
        if name.startswith(MPI_TRANSPORTS) and not name.endswith(_OF_THE_JOB)
    }
