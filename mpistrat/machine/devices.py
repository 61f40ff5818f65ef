"""Device names, the accelerators of this process, and how the ranks of a node share them.

The accelerators are the devices that `torch.accelerator` reports, of any kind: CUDA (also ROCm, under that name), Intel
XPU, or another. Without torch they are CuPy's devices.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from mpistrat.arrays import device_kinds

# "cpu", "CPU:1", "cuda:0", "gpu:0", "/device:CPU:0", "/job:worker/task:0/device:GPU:1"
_DEVICE = re.compile(
    r"(?P<host>/job:(?P<job>\w+)(?:/replica:\d+)?(?:/task:(?P<task>\d+))?)?(?:/device:|/)?"
    r"(?P<kind>[a-z]+)(?::(?P<index>\d+))?",
    re.IGNORECASE,
)


# For each rank of a node, in rank order, its result of `seen_accelerators`
_Seen = Sequence[Sequence[str]]


def check_device(device: str) -> str:
    """Return `device` in mpistrat's spelling: "cpu:0" for "CPU", "cuda:1" for "/device:GPU:1".

    "gpu" stands for this process's kind of accelerator; a missing number is 0.

    Raises: ValueError if `device` is no device name, or if this process does not see the accelerator.
    """
    match = _DEVICE.fullmatch(device) if isinstance(device, str) else None
    named = ""
    index = 0
    if match:
        named = match["kind"].lower()
        index = int(match["index"] or 0)
    present = accelerator() or "cuda"
    kind = {"gpu": present, "tpu": "xla"}.get(named, named)
    # "xla" is in `device_kinds` only after a TPUStrategy was built.
    if kind not in ("cpu", "cuda", present, *device_kinds):
        raise ValueError(f"expected a device such as 'cpu:0' or 'cuda:1', got {device!r:.60}")
    is_accelerator = kind in ("cuda", present)
    if is_accelerator and (kind != present or index >= num_accelerators()):
        raise ValueError(f"device {device!r} does not exist: this process sees {_seen_in_words()}")
    return f"{kind}:{index}"


def _seen_in_words() -> str:
    seen = f"{num_accelerators()} {accelerator()} devices" if accelerator() else "no GPUs"
    if {"torch", "cupy"} & sys.modules.keys():
        return seen
    return f"{seen}. Import torch, or cupy, before the strategy is built"


def task_of(device: str) -> tuple[str, int] | None:
    """Return the job and the task that `device` names: ("worker", 1) for "/job:worker/task:1/cpu:0".

    None if it names no task, or is no device name.
    """
    match = _DEVICE.fullmatch(device)
    if match is None or match["task"] is None:
        return None
    return match["job"], int(match["task"])


def check_devices(devices: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the device names as `check_device` spells them; None if `devices` is None or empty.

    Called by: the constructors of strategies.
    Raises: ValueError if `devices` is no list or tuple, a device does not exist, or the names are of several hosts;
        AssertionError if two devices are the same.
    """
    if not devices:
        return None
    if not isinstance(devices, (list, tuple)):
        raise ValueError(
            f"devices must be a list of device names, such as ['cpu:0', 'cpu:1'], got {devices!r:.60}"
        )
    matches = [_DEVICE.fullmatch(str(device)) for device in devices]
    hosts = {match["host"] for match in matches if match}
    if len(hosts) > 1 and hosts != {None, "/job:localhost"}:
        raise ValueError(
            f"devices must all be this rank's own; got some of other hosts in {list(devices)}. Ranks on "
            "other nodes join through MPI: start more ranks"
        )
    checked = tuple(check_device(device) for device in devices)
    if len(set(checked)) != len(checked):
        raise AssertionError(f"devices must be distinct, got {list(devices)}")
    return checked


def torch_accelerator() -> str:
    """Return torch's name for the kind of accelerators here: "cuda", "xpu", …; "" without torch, or if it sees none.

    "" also for "xla": a TPUStrategy manages XLA's devices.
    """
    torch = sys.modules.get("torch")
    device = None if torch is None else torch.accelerator.current_accelerator(check_available=True)
    kind = str(getattr(device, "type", ""))
    return "" if kind == "xla" else kind


def accelerator() -> str:
    """Return the kind of accelerators here: torch's name for it; "cuda" if only CuPy sees some; "" if neither does."""
    return torch_accelerator() or ("cuda" if _num_of_cupy() else "")


def num_accelerators() -> int:
    """Return how many accelerators torch sees, or CuPy if torch sees none; 0 if neither is loaded or sees any."""
    if torch_accelerator():
        return int(sys.modules["torch"].accelerator.device_count())
    return _num_of_cupy()


def _num_of_cupy() -> int:
    cupy = sys.modules.get("cupy")
    if cupy is None:
        return 0
    return int(cupy.cuda.runtime.getDeviceCount())


def seen_accelerators() -> tuple[str, ...]:
    """Return a name for each accelerator that this process sees, in the order of its numbers in this process.

    An accelerator has the same name in all processes of a node that load the same library. Its number may differ
    between processes, because CUDA_VISIBLE_DEVICES may differ, and in Slurm's control groups each task counts from 0.
    The name is a UUID (torch) or a PCI bus ID (CuPy). Torch devices without a UUID are named by kind and number: "xpu
    0". An empty tuple if the process sees no accelerator.
    """
    kind = torch_accelerator()
    numbers = range(num_accelerators())
    if not kind:
        devices = (sys.modules["cupy"].cuda.Device(i) for i in numbers)
        return tuple(str(device.pci_bus_id) for device in devices)
    module = sys.modules["torch"].get_device_module(kind)
    properties = getattr(module, "get_device_properties", lambda i: None)
    names = []
    for i in numbers:
        uuid = getattr(properties(i), "uuid", f"{kind} {i}")
        names.append(str(uuid))
    return tuple(names)


chosen: int | None = None  # the number of this rank's accelerator, once a strategy has chosen it


def make_current(index: int) -> None:
    """Make accelerator `index` of this process the current device of torch and CuPy, for calls such as `.cuda()`.

    It is this rank's accelerator from now on (`chosen`), and current in the calling thread only. Other threads call
    `make_own_current`.   Called by: a strategy, when it binds its devices.
    """
    global chosen
    chosen = index
    if torch_accelerator():
        sys.modules["torch"].accelerator.set_device_index(index)
    if _num_of_cupy():
        sys.modules["cupy"].cuda.Device(index).use()


def make_own_current() -> None:
    """Make this rank's accelerator the current device of this thread, if the rank has chosen one.

    Called by: each thread of mpistrat's that uses an accelerator, when it starts. CUDA makes device 0 the current
    device of a new thread. Many calls, such as a query of an event, would open a context there, and each rank of the
    node would take 0.5 GB on device 0.
    """
    if chosen is not None:
        make_current(chosen)


def current(device: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context that makes `device` torch's current accelerator in this thread: "cuda" then means "cuda:1".

    Entered around a replica's work. For a device that is not torch's accelerator, the context does nothing.
    """
    kind, _, index = device.partition(":")
    if kind == torch_accelerator():
        return sys.modules["torch"].accelerator.device_index(int(index))
    return contextlib.nullcontext()


# After an error in a call, torch's watchdog (a thread for NCCL) waits for a dump of its state, and four times as long
# for the dumps of other ranks. Then it ends the process. With these values it neither waits nor ends the process.
_AFTER_AN_ERROR = {
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
}
# Only one thread at a time makes a group: a second thread would take our variables for the user's.
_making = threading.RLock()


@contextlib.contextmanager
def nccl_that_outlives_errors() -> Iterator[None]:
    """Return a context. NCCL groups that torch makes inside it do not end the process after an error.

    Entered while mpistrat makes its own groups; one thread at a time is inside. It sets variables of the environment,
    unless the user has set them, and removes them at the end. Torch's watchdog still dumps and ends the process
    after an error in a group that the program makes outside.
    """
    with _making:
        # torch still reads NCCL_ASYNC_ERROR_HANDLING, the older name without a prefix.
        of_user = os.environ.keys() | {f"TORCH_{name}" for name in os.environ}
        ours = {name: text for name, text in _AFTER_AN_ERROR.items() if name not in of_user}
        os.environ.update(ours)
        try:
            yield
        finally:
            for name in ours:
                os.environ.pop(name, None)


def share_out(seen: _Seen) -> list[int | None]:
    """Choose an accelerator for each rank of a node. Not collective: equal arguments give equal results.

    Every accelerator gets one rank before any gets a second, as far as the ranks can see the accelerators (augmenting
    paths, as in H. W. Kuhn's method for assignments). If all ranks see the same accelerators, rank i gets number i
    modulo their number.

    Called by: `strategies.binding.bind`.
    Args: seen: the result of `seen_accelerators()` on each rank of the node, in rank order.
    Returns: for each rank, the accelerator's number in that rank's process; None for a rank that sees none.
    """
    return [
        names.index(share[0]) if share else None
        for names, share in zip(seen, _one_each(seen), strict=True)
    ]


def share_all(seen: _Seen) -> list[list[int]]:
    """Choose equally many accelerators for each rank of a node: as many as possible, and at least one.

    Not collective: equal arguments give equal results.
    Called by: `strategies.binding.bind_all`.
    Args: seen: the result of `seen_accelerators()` on each rank of the node, in rank order.
    Returns: for each rank, the accelerators' numbers in that rank's process, ascending; an empty list for a rank that
        sees none. Ranks share accelerators if there are too few.
    """
    shares = _one_each(seen)
    taken = {name for share in shares for name in share}
    for name in dict.fromkeys(name for names in seen for name in names):
        if name not in taken:
            ranks = [rank for rank, names in enumerate(seen) if name in names]
            poorest = min(ranks, key=lambda rank: len(shares[rank]))
            shares[poorest].append(name)
    fewest = min(len(share) for share in shares)
    count = max(1, fewest)
    numbers = []
    for names, share in zip(seen, shares, strict=True):
        kept = [names.index(name) for name in share[:count]]
        numbers.append(sorted(kept))
    return numbers


def _one_each(seen: _Seen) -> list[list[str]]:
    """Choose one accelerator for each rank, as `share_out`. Returns: for each rank, a list with its accelerator's name;
    an empty list for a rank that sees none.
    """
    users: dict[str, list[int]] = collections.defaultdict(list)
    for rank, names in enumerate(seen):
        if names:
            limit = 1
            while not _find_place(rank, seen, users, limit, set()):
                limit += 1
    shares: list[list[str]] = [[] for _ in seen]
    for name, ranks in users.items():
        for rank in ranks:
            shares[rank].append(name)
    return shares


def _find_place(
    rank: int,
    seen: _Seen,
    users: dict[str, list[int]],
    limit: int,
    tried: set[str],
) -> bool:
    """Give `rank` an accelerator with fewer than `limit` users, or another one if its user can move.

    Args:
        users: for each accelerator, the ranks that have it; changed in place.
        tried: the accelerators that the search has tried; changed in place.
    Returns: whether `rank` has got an accelerator; if not, `users` is unchanged.
    """
    idlest = min(seen[rank], key=lambda name: len(users[name]))
    if len(users[idlest]) < limit:
        users[idlest].append(rank)
        return True
    for name in seen[rank]:
        if name in tried:
            continue
        tried.add(name)
        for user in sorted(users[name]):
            if _find_place(user, seen, users, limit, tried):
                users[name].remove(user)
                users[name].append(rank)
                return True
    return False
