"""Device names, and how the ranks of a node share its GPUs."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Sequence

from mpistrat.arrays import device_kinds

# "cpu", "CPU:1", "cuda:0", "gpu:0", "/device:CPU:0", "/job:worker/task:0/device:GPU:1"
_DEVICE = re.compile(
    r"(?P<host>/job:(?P<job>\w+)(?:/replica:\d+)?(?:/task:(?P<task>\d+))?)?(?:/device:|/)?"
    r"(?P<kind>cpu|cuda|gpu|xla|tpu)(?::(?P<index>\d+))?",
    re.IGNORECASE,
)


def check_device(device: str) -> str:
    """`device` in our spelling ("cpu:0", "cuda:1"); ValueError for what is not a device of this rank."""
    match = _DEVICE.fullmatch(device) if isinstance(device, str) else None
    named = "" if match is None else match["kind"].lower()
    kind = {"gpu": "cuda", "tpu": "xla"}.get(named, named)
    # XLA's devices are those of a TPUStrategy: without one there are none.
    if match is None or kind not in ("cpu", "cuda", *device_kinds):
        raise ValueError(f"expected a device such as 'cpu:0' or 'cuda:1', got {device!r:.60}")
    index = int(match["index"] or 0)
    if kind == "cuda" and index >= num_gpus():
        raise ValueError(f"device {device!r} does not exist: this process sees {num_gpus()} GPUs")
    return f"{kind}:{index}"


def task_of(device: str) -> tuple[str, int] | None:
    """The job and the task that `device` names, such as ("worker", 1); None where it names none."""
    match = _DEVICE.fullmatch(device)
    return None if match is None or match["task"] is None else (match["job"], int(match["task"]))


def check_devices(devices: Sequence[str]) -> tuple[str, ...]:
    """Distinct devices of this rank, in our spelling."""
    if not isinstance(devices, (list, tuple)):
        raise ValueError(
            f"devices must be a list of device names, such as ['cpu:0', 'cpu:1'], got {devices!r:.60}"
        )
    hosts = {_DEVICE.fullmatch(d)["host"] for d in devices if _DEVICE.fullmatch(str(d))}  # type: ignore[index]
    if len(hosts - {None, "/job:localhost"}) and len(hosts) > 1:
        raise ValueError(
            f"devices must all be this rank's own; got some of other hosts in {list(devices)}. Ranks on "
            "other nodes join through MPI: start more ranks"
        )
    checked = tuple(check_device(device) for device in devices)
    if len(set(checked)) != len(checked):
        raise AssertionError(f"devices must be distinct, got {list(devices)}")
    return checked


def num_gpus() -> int:
    """The CUDA devices that this process sees; 0 where neither torch nor CuPy is loaded."""
    torch = sys.modules.get("torch")
    cupy = sys.modules.get("cupy")
    count = 0 if torch is None else int(torch.cuda.device_count())
    return count if count or cupy is None else int(cupy.cuda.runtime.getDeviceCount())


def seen_gpus() -> tuple[str, ...]:
    """What identifies the GPUs that this process sees, in the order of its own numbers.

    The same GPU has the same name in all processes of a node that load the same library, whatever each of them sees:
    CUDA_VISIBLE_DEVICES may differ, and inside Slurm's control groups the numbers begin at 0 in every task.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.device_count():
        count = torch.cuda.device_count()
        return tuple(str(torch.cuda.get_device_properties(i).uuid) for i in range(count))
    if num_gpus():
        cupy = sys.modules["cupy"]
        return tuple(str(cupy.cuda.Device(i).pci_bus_id) for i in range(num_gpus()))
    return ()


def make_current(index: int) -> None:
    """Have torch and CuPy take GPU `index` where a program names none, as in `.cuda()`."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.device_count():
        torch.cuda.set_device(index)
    cupy = sys.modules.get("cupy")
    if cupy is not None:
        cupy.cuda.Device(index).use()


def share_out(seen: Sequence[Sequence[str]]) -> list[int | None]:
    """Which of the GPUs that it sees each rank of a node uses, counted as it sees them; None where it sees none.

    Args:
        seen: `seen_gpus()` of each of the node's ranks, in rank order.

    Every GPU gets one rank before any gets a second, as far as what the ranks see allows it (augmenting paths, as in
    H. W. Kuhn's method for assignments). Ranks that all see the same GPUs take them in turn.
    """
    users: dict[str, list[int]] = {gpu: [] for own in seen for gpu in own}

    def place(rank: int, limit: int, tried: set[str]) -> bool:
        idlest = min(seen[rank], key=lambda gpu: len(users[gpu]))
        if len(users[idlest]) < limit:
            users[idlest].append(rank)
            return True
        for gpu in seen[rank]:
            if gpu in tried:
                continue
            tried.add(gpu)
            for other in sorted(users[gpu]):
                if place(other, limit, tried):
                    users[gpu].remove(other)
                    users[gpu].append(rank)
                    return True
        return False

    for rank, own in enumerate(seen):
        if own:
            next(limit for limit in itertools.count(1) if place(rank, limit, set()))
    chosen = {rank: gpu for gpu, ranks in users.items() for rank in ranks}
    return [own.index(chosen[rank]) if own else None for rank, own in enumerate(seen)]
