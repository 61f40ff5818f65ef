"""The facts of a job. Each rank gathers its facts as plain data, and the doctor's checks make findings of them.

Rank 0's MPI process gets the facts of all ranks, and sends them as JSON to its parent process. The parent runs the
checks.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")
Lists = list[list[str]]
_hints = functools.cache(typing.get_type_hints)


@dataclass(frozen=True)
class Software:
    """Versions of the software on a rank; "" for a package that is not installed."""

    python: str = ""
    executable: str = ""
    mpistrat: str = ""
    folder: str = ""  # the folder of the mpistrat that runs
    mpi4py: str = ""
    numpy: str = ""
    torch: str = ""
    torch_xla: str = ""


@dataclass(frozen=True)
class Launch:
    """The facts that a process knows of its launcher, of Slurm, and of the commands in PATH; "" for unknown text."""

    size: int | None = None  # the number of started ranks; None if it is not known
    rank: int | None = None
    variables: str = ""  # "PMI_SIZE=2, PMI_RANK=1"; "" if no launcher started this process
    launcher: str = ""  # "Open MPI's mpiexec"
    first_on_node: bool = True  # True also if the launcher does not tell
    slurm: dict[str, str] = field(default_factory=dict)  # by name: "SLURM_JOB_ID"
    mpirun: str = ""  # the path of the first mpirun in PATH
    mpirun_version: str = ""  # the first lines of `mpirun --version`
    srun_types: list[str] = field(default_factory=list)  # from `srun --mpi=list`: "pmi2", "pmix"
    job_state: str = ""  # from squeue: "RUNNING"; "gone" for a job that squeue does not know

    @property
    def speaks(self) -> bool:
        """Whether this process prints all findings if MPI does not start: it is rank 0, or does not know its rank."""
        return self.rank in (0, None)

    @property
    def of_several(self) -> bool:
        """Whether a launcher started this process, and may have started others: the number of ranks is not 1."""
        return bool(self.variables) and self.size != 1

    @property
    def by_srun(self) -> bool:
        return "srun" in self.launcher and "SLURM_STEP_ID" in self.slurm

    @property
    def of_ended_job(self) -> bool:
        """Whether the job of Slurm's variables has ended, or has not begun. False if its state is not known."""
        return self.job_state not in ("", "RUNNING", "COMPLETING", "SUSPENDED")


@dataclass(frozen=True)
class Library:
    """The MPI library that mpi4py has loaded on a rank."""

    path: str = ""
    version: str = ""  # from MPI_Get_library_version
    standard: list[int] = field(default_factory=list)  # [4, 1]
    thread_level: str = ""  # "multiple", once MPI runs
    candidates: Lists = field(default_factory=list)  # [rule, path], in mpi4py's order
    built_for_one: bool = False  # mpi4py was built with this library, and looks for no other


@dataclass(frozen=True)
class Cores:
    """The cores of a rank."""

    allowed: list[int] = field(default_factory=list)  # this rank's affinity mask
    of_launcher: int = 0  # cores that the launcher may use here; without a launcher, this rank
    quota: float | None = None  # CPUs' worth of time that a control group allows
    # The user's variables for numbers of threads: {"OMP_NUM_THREADS": "8"}.
    threads: dict[str, str] = field(default_factory=dict)
    caches: list[str] = field(default_factory=list)  # that all its cores share; see `caches_of`
    distance: float = 0.0  # to the next rank's core, in seconds; 0 if it was not measured


@dataclass(frozen=True)
class Room:
    """The size of a file system and its free space, in bytes."""

    folder: str
    size: int
    free: int


@dataclass(frozen=True)
class MemoryLimits:
    """The memory and the limits of a rank, in bytes if nothing else is said. None: no limit, or no such file system."""

    shared: Room | None = None  # /dev/shm
    temporary: Room | None = None  # the folder for temporary files
    available: int = 0  # free memory of the node
    group_limit: int | None = None  # the control group's limit
    group_used: int = 0  # memory in use in the control group
    address_space: int | None = None  # ulimit -v
    locked: int | None = None  # ulimit -l
    files: int | None = None  # ulimit -n: open files and connections
    files_most: int | None = None  # the hard limit of `files`
    infiniband: bool = False  # whether the node has an InfiniBand device


@dataclass(frozen=True)
class Driver:
    """CUDA's driver, as one rank sees it."""

    installed: bool = False
    gpus: list[str] = field(default_factory=list)  # UUIDs of the GPUs that the rank may use
    error: str = ""  # why the driver gives no answer
    hangs: bool = False  # then torch, nvidia-smi and all others that ask it wait for ever


@dataclass(frozen=True)
class Gpus:
    """The GPUs and the NCCL that a process sees when it imports torch, then CuPy."""

    named: list[str] = field(default_factory=list)  # from CUDA_VISIBLE_DEVICES, else nvidia-smi
    torch: str = ""  # "" if torch is not installed or cannot be imported
    torch_error: str = ""
    torch_cuda: str = ""  # "13.0"; "" for another build
    torch_other: str = ""  # "ROCm 6.4", "oneAPI 20250201"; "" for a build for CUDA or CPUs
    torch_gpus: int = 0
    cupy: str = ""
    cupy_error: str = ""
    nccl_loaded: Lists = field(default_factory=list)  # [path, "2.27.5"], in one process
    nccl_visible: Lists = field(default_factory=list)  # [WHEEL or LIBRARY_PATH, path]
    mpi_refusal: str | None = None  # why MPI does not take GPU memory; "": it does; None: not tried


@dataclass(frozen=True)
class Clock:
    """The comparison of a node's time of day with node 0's.

    Attributes:
        node: the node's number.
        ahead: how many seconds the node's clock is ahead of node 0's; negative: behind.
        error: the largest possible error of `ahead`, in seconds.
    """

    node: int
    ahead: float
    error: float


@dataclass(frozen=True)
class Links:
    """The measured speeds between the nodes of a job, for the doctor's check of the network.

    Attributes:
        rates: for each measured pair, a list [node, other node, bytes per second].
        speeds: for each node, the speeds of its network devices as text: "25000 Mb/s".
        pairs: the number of all pairs of nodes; `rates` may have fewer.
    """

    rates: list[list[float]] = field(default_factory=list)
    speeds: Lists = field(default_factory=list)
    pairs: int = 0


@dataclass(frozen=True)
class RankFacts:
    """All facts about one rank."""

    rank: int = 0
    node: int = 0
    host: str = ""
    software: Software = Software()
    launch: Launch = Launch()
    library: Library | None = None
    cores: Cores = Cores()
    memory: MemoryLimits = MemoryLimits()
    driver: Driver = Driver()
    gpus: Gpus | None = None  # None except on the first rank of a node

    @property
    def loaded(self) -> Library:
        """The MPI library that the rank has loaded; a `Library` with path "" if none was loaded."""
        return self.library or Library()


Ranks = list[RankFacts]  # in rank order


@dataclass(frozen=True)
class JobFailure:
    """Why there is no MPI job.

    Attributes:
        stage: the step that failed: "MPI_Init".
        kind: "topology" (launcher and library contradict each other), "library" (no MPI library could be loaded),
            "ended" (the process ended in the step) or "late" (the step took too long).
        text: the failure in words.
        words: the last lines that the process wrote to stdout and stderr; "" if none.
    """

    stage: str
    kind: str
    text: str
    words: str = ""


@dataclass(frozen=True)
class JobFacts:
    """The facts of a job. The doctor's checks read them and make their findings.

    Attributes:
        ranks: the facts of all ranks, in rank order; only the facts of this rank if MPI did not start.
        failure: how MPI failed; None if it started.
    """

    ranks: Ranks
    failure: JobFailure | None = None
    clocks: list[Clock] = field(default_factory=list)
    links: Links | None = None

    @property
    def first(self) -> RankFacts:
        return self.ranks[0]

    def nodes(self) -> dict[str, Ranks]:
        """Return {node's name: its ranks}, in the order of the nodes' numbers.

        The name is the host name. Nodes with the same host name get separate keys: "host (node 0)", "host (node 1)".
        """
        of_node = grouped((rank.node, rank) for rank in self.ranks)
        hosts = [ranks[0].host for ranks in of_node.values()]
        found: dict[str, Ranks] = {}
        for node, ranks in sorted(of_node.items()):
            host = ranks[0].host
            name = host if hosts.count(host) == 1 else f"{host} (node {node})"
            found[name] = ranks
        return found


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Return a dict from each key to the list of its values. The keys are in the order of their first pair."""
    found: dict[Key, list[Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


as_json = dataclasses.asdict


def from_json(kind: Any, value: Any) -> Any:
    """Return an object of the type `kind` from `value`, the result of reading JSON. The inverse of `as_json`.

    A dict becomes a dataclass, a list a list of dataclasses; a value of any other type is returned as it is.
    """
    kinds = (kind, *typing.get_args(kind))  # `kind` may be a dataclass, or None, or a list of them
    found: Any = next(filter(dataclasses.is_dataclass, kinds), None)
    if found is None:
        return value
    if isinstance(value, list):
        return [from_json(found, part) for part in value]
    if isinstance(value, dict):
        hints = _hints(found)
        fields = {}
        for name, part in value.items():
            fields[name] = from_json(hints[name], part)
        return found(**fields)
    return value
