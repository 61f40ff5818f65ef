"""The facts of a job: each rank gathers them as plain data, and the checks judge them.

The ranks send them as JSON to the process that judges.
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
_hints = functools.cache(typing.get_type_hints)


@dataclass(frozen=True)
class Software:
    """Versions; "" for what is not installed."""

    python: str = ""
    executable: str = ""
    mpistrat: str = ""
    folder: str = ""  # of the mpistrat that runs
    mpi4py: str = ""
    numpy: str = ""
    torch: str = ""
    torch_xla: str = ""


@dataclass(frozen=True)
class Launch:
    """What the launcher and Slurm say about this process, and which commands are there."""

    size: int | None = None  # ranks that were started; None where nobody says
    rank: int | None = None
    variables: str = ""  # "PMI_SIZE=2, PMI_RANK=1"; "" where no launcher started this process
    launcher: str = ""  # "Open MPI's mpiexec"
    first_on_node: bool = True  # also where the launcher does not say
    slurm: dict[str, str] = field(default_factory=dict)  # its variables
    mpirun: str = ""  # the first in PATH
    mpirun_version: str = ""  # the first lines of its --version
    srun_types: list[str] = field(default_factory=list)  # of `srun --mpi=list`: "pmi2", "pmix"
    job_state: str = ""  # as squeue has it: "RUNNING"; "gone" for a job that it does not know

    @property
    def speaks(self) -> bool:
        """Whether this process is the one that speaks where the ranks cannot find each other."""
        return self.rank in (0, None)

    @property
    def of_several(self) -> bool:
        """Whether a launcher started this process, beside others for all that it says."""
        return bool(self.variables) and self.size != 1

    @property
    def by_srun(self) -> bool:
        return "srun" in self.launcher and "SLURM_STEP_ID" in self.slurm

    @property
    def of_ended_job(self) -> bool:
        """Whether Slurm's variables are those of a job that does not run."""
        return self.job_state not in ("", "RUNNING", "COMPLETING", "SUSPENDED")


@dataclass(frozen=True)
class Library:
    """The MPI library that mpi4py loads."""

    path: str = ""
    version: str = ""  # MPI_Get_library_version
    standard: list[int] = field(default_factory=list)  # [4, 1]
    thread_level: str = ""  # "multiple", once MPI runs
    candidates: list[list[str]] = field(default_factory=list)  # [rule, path], in mpi4py's order
    built_for_one: bool = False  # mpi4py was built with it, and looks for no other


@dataclass(frozen=True)
class Cores:
    allowed: list[int] = field(default_factory=list)  # this rank's affinity mask
    of_launcher: int = 0  # how many the launcher may use here; this rank, where none is found
    quota: float | None = None  # CPUs' worth of time that a control group allows
    # {"OMP_NUM_THREADS": "8"}, as the user set them.
    threads: dict[str, str] = field(default_factory=dict)
    caches: list[str] = field(default_factory=list)  # that its cores share, as `caches_of` has them
    distance: float = 0.0  # seconds: `distance` from the next rank's; 0 where it is not measured


@dataclass(frozen=True)
class Room:
    """Room in a file system, in bytes."""

    folder: str
    size: int
    free: int


@dataclass(frozen=True)
class MemoryLimits:
    """Sizes in bytes; None: no limit."""

    shared: Room | None = None  # /dev/shm
    temporary: Room | None = None
    window_megabytes: float | None = None  # MPISTRAT_SHARED_MB
    available: int = 0  # of the node
    group_limit: int | None = None  # the control group's
    group_used: int = 0
    address_space: int | None = None
    locked: int | None = None
    files: int | None = None
    files_most: int | None = None
    infiniband: bool = False


@dataclass(frozen=True)
class Driver:
    """CUDA's driver, as a rank sees it."""

    installed: bool = False
    gpus: list[str] = field(default_factory=list)  # UUIDs of those that the rank may use
    error: str = ""  # why it cannot be asked
    hangs: bool = False  # torch, nvidia-smi and all others that ask it wait for ever


@dataclass(frozen=True)
class Gpus:
    """The GPUs as a process sees them that imports torch, then CuPy."""

    named: list[str] = field(default_factory=list)  # by CUDA_VISIBLE_DEVICES, else by nvidia-smi
    torch: str = ""  # "" where it is not installed, or cannot be imported
    torch_error: str = ""
    torch_cuda: str = ""  # "13.0"; "" for another build
    torch_other: str = ""  # "ROCm 6.4", "oneAPI 20250201"; "" for a build for CUDA or CPUs
    torch_gpus: int = 0
    cupy: str = ""
    cupy_error: str = ""
    nccl_loaded: list[list[str]] = field(default_factory=list)  # [path, "2.27.5"], mapped together
    nccl_visible: list[list[str]] = field(default_factory=list)  # [where, path]
    mpi_refusal: str | None = None  # "": MPI takes memory of GPUs; None: not asked


@dataclass(frozen=True)
class Clock:
    """How far a node's time of day is ahead of node 0's, in seconds, give or take `error`."""

    node: int
    ahead: float
    error: float


@dataclass(frozen=True)
class Links:
    """What was measured between nodes.

    Attributes:
        rates: [node, other node, bytes per second].
        speeds: of each node, what its devices say: "25000 Mb/s".
        pairs: how many pairs there are.
    """

    rates: list[list[float]] = field(default_factory=list)
    speeds: list[list[str]] = field(default_factory=list)
    pairs: int = 0


@dataclass(frozen=True)
class RankFacts:
    rank: int = 0
    node: int = 0
    host: str = ""
    software: Software = Software()
    launch: Launch = Launch()
    library: Library | None = None
    cores: Cores = Cores()
    memory: MemoryLimits = MemoryLimits()
    driver: Driver = Driver()
    gpus: Gpus | None = None  # of the first rank of a node

    @property
    def loaded(self) -> Library:
        """The library; one without a path where none was loaded."""
        return self.library or Library()


@dataclass(frozen=True)
class JobFailure:
    """Why there is no MPI job.

    Attributes:
        stage: what was being done: "MPI_Init".
        kind: "topology" (launcher and library contradict each other), "library" (no MPI), "ended" or "late".
        text: what happened.
        words: the last lines that the process wrote.
    """

    stage: str
    kind: str
    text: str
    words: str = ""


@dataclass(frozen=True)
class Job:
    """All ranks that could be asked; one, where MPI did not start."""

    ranks: list[RankFacts]
    failure: JobFailure | None = None
    clocks: list[Clock] = field(default_factory=list)
    links: Links | None = None

    @property
    def first(self) -> RankFacts:
        return self.ranks[0]

    def nodes(self) -> dict[str, list[RankFacts]]:
        """The ranks of each node by its name. Where several nodes have one name, their numbers are added."""
        of_node = grouped((rank.node, rank) for rank in self.ranks)
        ranks = [of_node[node] for node in sorted(of_node)]
        hosts = [ranks_of[0].host for ranks_of in ranks]
        names = (
            host if hosts.count(host) == 1 else f"{host} (node {node})"
            for node, host in enumerate(hosts)
        )
        return dict(zip(names, ranks, strict=True))


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """The values of each key. The keys keep their order."""
    found: dict[Key, list[Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


as_json = dataclasses.asdict


def from_json(kind: Any, value: Any) -> Any:
    """The inverse of `as_json`: `value`, as JSON has it, as a `kind`."""
    kinds = (kind, *typing.get_args(kind))  # of "a dataclass or None", and of a list of dataclasses
    found: Any = next(filter(dataclasses.is_dataclass, kinds), None)
    if found is None:
        return value
    if isinstance(value, list):
        return [from_json(found, part) for part in value]
    if isinstance(value, dict):
        return found(**{name: from_json(_hints(found)[name], part) for name, part in value.items()})
    return value
