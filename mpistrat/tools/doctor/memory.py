"""Memory that ranks share, and limits on memory, files and disk space."""

from __future__ import annotations

import dataclasses
import math
import os
import resource
import tempfile
from collections.abc import Iterator, Sequence

from mpistrat.errors import TopologyError
from mpistrat.settings import shared_bytes
from mpistrat.tools.doctor.control_groups import allowed
from mpistrat.tools.doctor.facts import Job, Memory, Rank, Room
from mpistrat.tools.doctor.finding import OK, PROBLEM, WARNING, Finding
from mpistrat.tools.doctor.wording import bytes_in_words, count

CHECK = "memory"
SHARED = "/dev/shm"
# A rank's share of a node's windows (docs/how_values_move.md): fixed, and per byte of gradients
FIXED_BYTES, GRADIENTS = 3.1e6, 3
FEW_PARAMETERS = 10e6
LITTLE_SPACE = 1e9
LITTLE_MEMORY = 1e9  # per rank
FEW_FILES = 4096
FILES_PER_RANK, FILES_OF_A_PROGRAM = (
    4,
    256,
)  # connections and shared segments; modules, data, workers


def look() -> Memory:
    group = allowed()
    soft, hard = (_no_limit(limit) for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    try:
        megabytes = shared_bytes() / 1e6
    except TopologyError:
        megabytes = math.inf  # what reads it later says so
    return Memory(
        shared=_room(SHARED),
        temporary=_room(_temporary_folder()),
        window_megabytes=None if math.isinf(megabytes) else megabytes,
        available=_available(),
        group_limit=group.memory,
        group_used=group.memory_used,
        address_space=_no_limit(resource.getrlimit(resource.RLIMIT_AS)[0]),
        locked=_no_limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        files=soft,
        files_most=hard,
        infiniband=bool(_listed("/sys/class/infiniband")),
    )


def check(job: Job) -> Iterator[Finding]:
    well: dict[str, Memory] = {}
    for ranks, name in zip(job.nodes(), job.node_names(), strict=True):
        found = [
            *_shared(ranks),
            *_limits(ranks),
            *_files(ranks, len(job.ranks)),
            *_space(ranks),
        ]
        yield from (dataclasses.replace(finding, nodes=(name,)) for finding in found)
        if not found:
            well[name] = ranks[0].memory
    if well:
        yield Finding(CHECK, OK, _summary(list(well.values())), nodes=tuple(well))


def _shared(ranks: Sequence[Rank]) -> Iterator[Finding]:
    room, megabytes = ranks[0].memory.shared, ranks[0].memory.window_megabytes
    if megabytes == 0:
        return  # everything goes through MPI, as the user wishes
    if room is None:
        yield Finding(
            CHECK,
            PROBLEM,
            f"There is no {SHARED}: ranks cannot share memory, and MPI itself may not start.",
            "mount a tmpfs there; in a container, bind the host's (apptainer exec --bind /dev/shm …)",
        )
        return
    fix = (
        f"make it larger (docker run --shm-size=8g …, or --ipc=host; on a node: mount -o remount,size=50% {SHARED}), "
        f"remove what ended jobs left there, or bound what windows take with {shared_bytes.name}"
    )
    each = room.free / len(ranks)
    parameters = (each - FIXED_BYTES) / (GRADIENTS * 4)
    told = f"{SHARED} has {bytes_in_words(room.free)} free of {bytes_in_words(room.size)}"
    if parameters <= 0:
        needed = FIXED_BYTES * len(ranks)
        yield Finding(
            CHECK,
            PROBLEM,
            f"{told}; the windows of {count(len(ranks), 'rank')} take {bytes_in_words(needed)} before any gradients.",
            fix,
        )
    elif megabytes is not None and megabytes * 1e6 > each:
        yield Finding(
            CHECK,
            WARNING,
            f"{told}, but {shared_bytes.name}={megabytes:g} allows {count(len(ranks), 'rank')} "
            f"{bytes_in_words(megabytes * 1e6 * len(ranks))}: what finds no room goes through MPI, and is slower.",
            f"set {shared_bytes.name}={int(each / 1e6)}, or {fix}",
        )
    elif megabytes is None and parameters < FEW_PARAMETERS:
        yield Finding(
            CHECK,
            WARNING,
            f"{told}: windows of {count(len(ranks), 'rank')} hold gradients of {parameters / 1e6:.1f} million float32 "
            "parameters there.",
            fix,
        )


def _limits(ranks: Sequence[Rank]) -> Iterator[Finding]:
    memory = ranks[0].memory
    if memory.available and _left(memory) < LITTLE_MEMORY * len(ranks):
        limit = memory.group_limit
        of_group = (
            "" if limit is None else f" of {bytes_in_words(limit)} that a control group allows"
        )
        yield Finding(
            CHECK,
            WARNING,
            f"{count(len(ranks), 'rank')} here have {bytes_in_words(_left(memory))} of memory left{of_group}.",
            "ask Slurm for more (--mem=…, --mem-per-cpu=…), raise the container's limit, or start fewer ranks per "
            "node: torch alone takes 300 MB in each",
        )
    if memory.address_space is not None:
        yield Finding(
            CHECK,
            WARNING,
            f"ulimit -v is {bytes_in_words(memory.address_space)}: shared windows, CUDA and threads take "
            "far more addresses than memory.",
            "ulimit -v unlimited in the job script",
        )
    if memory.infiniband and memory.locked is not None:
        yield Finding(
            CHECK,
            PROBLEM,
            f"There is InfiniBand, which needs locked memory, and ulimit -l allows "
            f"{bytes_in_words(memory.locked)}: MPI falls back to a slower network, or ends.",
            "ulimit -l unlimited; under Slurm PropagateResourceLimitsExcept=MEMLOCK in slurm.conf and "
            "LimitMEMLOCK=infinity for slurmd (its administrators)",
        )


def _files(ranks: Sequence[Rank], all_ranks: int) -> Iterator[Finding]:
    memory = ranks[0].memory
    needed = FILES_OF_A_PROGRAM + FILES_PER_RANK * all_ranks
    if memory.files is None or memory.files >= max(needed, FEW_FILES):
        return
    most = "unlimited" if memory.files_most is None else str(memory.files_most)
    short = memory.files < needed
    yield Finding(
        CHECK,
        PROBLEM if short else WARNING,
        f"A process may open {memory.files} files and connections (ulimit -n); "
        + (
            f"{all_ranks} ranks may need {needed}."
            if short
            else "workers of a DataLoader can need more."
        ),
        f"ulimit -n {most} in the job script" + " (the hard limit; the administrators can raise it)"
        if memory.files_most is not None and memory.files_most < FEW_FILES
        else f"ulimit -n {most} in the job script",
    )


def _space(ranks: Sequence[Rank]) -> Iterator[Finding]:
    room = ranks[0].memory.temporary
    if room is None:
        yield Finding(
            CHECK,
            PROBLEM,
            "There is no folder for temporary files that can be written.",
            "set TMPDIR to one that exists on every node, such as a local disk's",
        )
    elif room.free < LITTLE_SPACE:
        yield Finding(
            CHECK,
            WARNING,
            f"The folder for temporary files, {room.folder}, has {bytes_in_words(room.free)} left. MPI and "
            "torch write there.",
            "remove what is old there, or set TMPDIR to a local disk with more",
        )


def _summary(memories: Sequence[Memory]) -> str:
    """The least of all nodes."""
    rooms = [memory.shared for memory in memories if memory.shared]
    folders = [memory.temporary for memory in memories if memory.temporary]
    left = [_left(memory) for memory in memories if memory.available]
    files = [memory.files for memory in memories if memory.files is not None]
    parts = []
    if rooms:
        parts.append(f"{SHARED} has {bytes_in_words(min(room.free for room in rooms))} free")
    if left:
        parts.append(f"{bytes_in_words(min(left))} of memory left")
    if folders:
        least = min(folders, key=lambda room: room.free)
        parts.append(f"{bytes_in_words(least.free)} of disk in {least.folder}")
    if files:
        parts.append(f"{min(files)} open files allowed")
    return f"{', '.join(parts)}{' at least' * (len(memories) > 1)}."


def _left(memory: Memory) -> int:
    """Bytes that programs could still have."""
    if memory.group_limit is None:
        return memory.available
    return min(memory.available, memory.group_limit - memory.group_used)


def _room(folder: str | None) -> Room | None:
    try:
        if folder is None:
            return None
        told = os.statvfs(folder)
    except OSError:
        return None
    return Room(folder, told.f_frsize * told.f_blocks, told.f_frsize * told.f_bavail)


def _temporary_folder() -> str | None:
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        return None


def _available() -> int:
    """Bytes of memory that programs could have, by /proc/meminfo; 0 where it does not tell."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(
                int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")
            )
    except (OSError, StopIteration, ValueError):
        return 0


def _no_limit(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
