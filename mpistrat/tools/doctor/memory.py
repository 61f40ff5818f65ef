"""Check the room in /dev/shm, and limits on memory, files and disk space."""

from __future__ import annotations

import glob
import os
import resource
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from mpistrat.errors import counted
from mpistrat.machine.control_groups import allowed, number_in
from mpistrat.tools.doctor.facts import JobFacts, MemoryLimits, Room
from mpistrat.tools.doctor.finding import Findings, bytes_in_words, findings_of, on_node

ok, warning, problem = findings_of("memory")
SHARED = "/dev/shm"
# Headings of docs/troubleshooting.md
_FULL = "Bus error"
_FILES = "Too many open files"
# Bytes of /dev/shm for each rank: what MPICH 4 takes in MPI_Init (measured with 1 to 8 ranks; Open MPI takes less), and
# what leaves room for batches from the workers of a DataLoader. mpistrat's own windows are not there
# (`communicators.node.shared_memory`).
BYTES_OF_MPI = 5.4e6
LITTLE_SHARED = 100e6
LITTLE_SPACE = 1e9
LITTLE_MEMORY = 1e9  # per rank
FEW_FILES = 4096
FILES_PER_RANK = 4  # connections and shared segments
FILES_OF_A_PROGRAM = 256  # modules, data, workers


def look() -> MemoryLimits:
    group = allowed()
    files, files_most = _limits_of(resource.RLIMIT_NOFILE)
    return MemoryLimits(
        shared=_room(lambda: SHARED),
        temporary=_room(tempfile.gettempdir),
        available=number_in(Path("/proc/meminfo"), "MemAvailable") * 1024,
        group_limit=group.memory,
        group_used=group.memory_used,
        address_space=_limits_of(resource.RLIMIT_AS)[0],
        locked=_limits_of(resource.RLIMIT_MEMLOCK)[0],
        files=files,
        files_most=files_most,
        infiniband=bool(glob.glob("/sys/class/infiniband/*")),
    )


def check(job: JobFacts) -> Findings:
    well: dict[str, MemoryLimits] = {}
    for name, ranks in job.nodes().items():
        memory = ranks[0].memory
        here = len(ranks)
        found = [
            *_shared(memory, here),
            *_limits(memory, here),
            *_files(memory, len(job.ranks)),
            *_space(memory),
        ]
        yield from on_node(name, found)
        if not found:
            well[name] = memory
    if well:
        yield ok(_summary(list(well.values())), nodes=tuple(well))


def _shared(memory: MemoryLimits, here: int) -> Findings:
    room = memory.shared
    ranks = counted(here, "rank")
    if room is None:
        yield problem(
            f"There is no {SHARED}, where MPI and the workers of a DataLoader share memory: MPI may not start.",
            "mount a tmpfs there; in a container, bind the host's /dev/shm (apptainer exec --bind /dev/shm …)",
            _FULL,
        )
        return
    fix = (
        f"make it larger (docker run --shm-size=8g …, or --ipc=host; on a node: mount -o remount,size=50% {SHARED}), "
        "or remove what ended jobs left there"
    )
    free = f"{SHARED} has {bytes_in_words(room.free)} free of {bytes_in_words(room.size)}"
    if room.free < BYTES_OF_MPI * here:
        needed = bytes_in_words(BYTES_OF_MPI * here)
        yield problem(f"{free}; MPI may need {needed} there to start {ranks}.", fix, _FULL)
    elif room.free < LITTLE_SHARED * here:
        yield warning(
            f"{free}, for MPI and for the workers of the DataLoaders of {ranks}: SIGBUS ends a process that finds no "
            "room.",
            fix,
            _FULL,
        )


def _limits(memory: MemoryLimits, here: int) -> Findings:
    if memory.available and _left(memory) < LITTLE_MEMORY * here:
        limit = memory.group_limit
        of_group = ""
        if limit is not None:
            of_group = f" of {bytes_in_words(limit)} that a control group allows"
        yield warning(
            f"{counted(here, 'rank')} here have {bytes_in_words(_left(memory))} of memory left{of_group}.",
            "ask Slurm for more (--mem=…, --mem-per-cpu=…), raise the container's limit, or start fewer ranks per "
            "node: torch alone takes 200 MB or more in each",
            "oom_kill",
        )
    if memory.address_space is not None:
        yield warning(
            f"ulimit -v is {bytes_in_words(memory.address_space)}: shared windows, CUDA and threads take "
            "far more addresses than memory.",
            "ulimit -v unlimited in the job script",
            "Cannot allocate memory",
        )
    if memory.infiniband and memory.locked is not None:
        yield problem(
            f"There is InfiniBand, which needs locked memory, and ulimit -l allows "
            f"{bytes_in_words(memory.locked)}: MPI falls back to a slower network, or ends.",
            "ulimit -l unlimited; under Slurm PropagateResourceLimitsExcept=MEMLOCK in slurm.conf and "
            "LimitMEMLOCK=infinity for slurmd (its administrators)",
            "Locked memory",
        )


def _files(memory: MemoryLimits, all_ranks: int) -> Findings:
    needed = FILES_OF_A_PROGRAM + FILES_PER_RANK * all_ranks
    if memory.files is None or memory.files >= max(needed, FEW_FILES):
        return
    most = memory.files_most
    fix = f"ulimit -n {most or 'unlimited'} in the job script"
    if most is not None and most < max(needed, FEW_FILES):
        fix = (
            f"have the hard limit, {most}, raised: LimitNOFILE= of slurmd or sshd, /etc/security/limits.conf (by the "
            "administrators), docker run --ulimit nofile=65536"
        )
    open_files = f"A process may open {memory.files} files and connections (ulimit -n)"
    if memory.files < needed:
        yield problem(f"{open_files}; {counted(all_ranks, 'rank')} may need {needed}.", fix, _FILES)
    else:
        yield warning(f"{open_files}; workers of a DataLoader can need more.", fix, _FILES)


def _space(memory: MemoryLimits) -> Findings:
    room = memory.temporary
    if room is None:
        yield problem(
            "There is no folder for temporary files that can be written.",
            "set TMPDIR to a folder that exists on every node, such as on a local disk",
            "No space left on device",
        )
    elif room.free < LITTLE_SPACE:
        yield warning(
            f"The folder for temporary files, {room.folder}, has {bytes_in_words(room.free)} left. MPI and "
            "torch write there.",
            "remove old files there, or set TMPDIR to a local disk with more space",
            "No space left on device",
        )


def _summary(memories: Sequence[MemoryLimits]) -> str:
    """Return a sentence with the least free memory, disk space and file limit of any of the nodes."""
    shared = _fullest(memory.shared for memory in memories)
    temporary = _fullest(memory.temporary for memory in memories)
    left = [_left(memory) for memory in memories if memory.available]
    files = [memory.files for memory in memories if memory.files is not None]
    parts = []
    if shared:
        parts.append(f"{SHARED} has {bytes_in_words(shared.free)} free")
    if left:
        parts.append(f"{bytes_in_words(min(left))} of memory left")
    if temporary:
        parts.append(f"{bytes_in_words(temporary.free)} of disk in {temporary.folder}")
    if files:
        parts.append(f"{min(files)} open files allowed")
    text = ", ".join(parts)
    if len(memories) > 1:
        text += " at least"
    return f"{text}."


def _fullest(rooms: Iterable[Room | None]) -> Room | None:
    """Return the file system with the least free space; None if there is none. None among `rooms` is skipped."""
    return min(filter(None, rooms), key=lambda room: room.free, default=None)


def _left(memory: MemoryLimits) -> int:
    """Return the bytes of memory that programs can still allocate: the node's, or less under a control group."""
    if memory.group_limit is None:
        return memory.available
    return min(memory.available, memory.group_limit - memory.group_used)


def _room(folder_of: Callable[[], str]) -> Room | None:
    """Return the size and free space of the file system with the folder; None if the folder cannot be found."""
    try:
        folder = folder_of()
        system = os.statvfs(folder)
    except OSError:
        return None
    size = system.f_frsize * system.f_blocks
    free = system.f_frsize * system.f_bavail
    return Room(folder, size, free)


def _limits_of(kind: int) -> list[int | None]:
    """Return [soft limit, hard limit] of the resource `kind`, such as RLIMIT_NOFILE; None for no limit."""
    return [None if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(kind)]
