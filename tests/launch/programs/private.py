"""A job whose umask hides nothing: `private.py FOLDER`, on every rank. It tells what others could read, and its ports.

Afterwards the last rank kills itself, so that there is a report.
"""

import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

os.umask(0)

from mpi4py import MPI  # noqa: E402 - files that MPI_Init makes are part of it

LISTENING = "0A"


def listening(pid: str = "self") -> set[str]:
    """The process's sockets that accept TCP connections, by inode."""
    ports = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if os.path.exists(table):
            rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
            ports |= {row[9] for row in rows if row[3] == LISTENING}
    own = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            own.add(os.readlink(descriptor))
        except FileNotFoundError:  # the one that lists them
            continue
    return {inode for inode in ports if f"socket:[{inode}]" in own}


def readable_by_others(paths: Iterable[Path]) -> list[str]:
    return [
        f"{path} {path.stat().st_mode & 0o777:o}" for path in paths if path.stat().st_mode & 0o077
    ]


def observers() -> list[str]:
    """Processes of this job that run mpistrat's code and are no ranks."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            commands = (folder / "cmdline").read_bytes()
            same_job = os.environ["MPISTRAT_TEST_JOB"].encode() in (folder / "environ").read_bytes()
        except OSError:
            continue
        if same_job and b"mpistrat.liveness" in commands:
            found.append(folder.name)
    return found


def main(folder: Path) -> None:
    world = MPI.COMM_WORLD
    world.allreduce(bytes(1 << 20))
    before = listening()

    import torch

    import mpistrat as ms

    strategy = ms.MultiWorkerMirroredStrategy(gradients="mean")
    with strategy.scope():
        model = torch.nn.Linear(700, 700)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        strategy.run(step, (torch.ones(2, 700),))
    checkpoint = ms.checkpoint.Checkpoint(model=model, optimizer=optimizer)
    ms.checkpoint.CheckpointManager(checkpoint, str(folder / "checkpoints")).save(1)
    world.barrier()
    if world.rank == 0:
        (job,) = {
            path.parent
            for path in Path(f"/dev/shm/mpistrat-{os.getuid()}").glob("*/rank-0")
            if str(os.getpid()) in path.parent.name or is_mapped(path)
        }
        in_memory = [job, job.parent, job.with_name(f"{job.name}.lock"), *job.iterdir()]
        print(f"{len(in_memory)} files in memory, readable: {readable_by_others(in_memory)}")
        ports = [listening(pid) for pid in observers()]
        print(f"observers listen on {ports}")
    print(f"rank {world.rank} listens on {sorted(listening() - before)} of its own")
    sys.stdout.flush()
    world.barrier()
    if world.rank == world.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    strategy.extended.communicator.barrier()


def is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
