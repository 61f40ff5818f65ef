"""Device names, and which devices a rank has by default."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from mpistrat.topology import Topology

# "cpu", "CPU:1", "cuda:0", "gpu:0", "/device:CPU:0", "/job:worker/task:0/device:GPU:1"
_DEVICE = re.compile(
    r"(?:(?P<host>/job:\w+(?:/replica:\d+)?(?:/task:\d+)?))?(?:/device:|/)?"
    r"(?P<kind>cpu|cuda|gpu)(?::(?P<index>\d+))?",
    re.IGNORECASE,
)


def check_device(device: str) -> str:
    """`device` in our spelling ("cpu:0", "cuda:1"); ValueError for what is not a device of this rank."""
    match = _DEVICE.fullmatch(device) if isinstance(device, str) else None
    if match is None:
        raise ValueError(f"expected a device such as 'cpu:0' or 'cuda:1', got {device!r:.60}")
    kind = "cpu" if match["kind"].lower() == "cpu" else "cuda"
    index = int(match["index"] or 0)
    if kind == "cuda" and index >= num_gpus():
        raise ValueError(f"device {device!r} does not exist: this process sees {num_gpus()} GPUs")
    return f"{kind}:{index}"


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
    if torch is not None:
        return int(torch.cuda.device_count())
    cupy = sys.modules.get("cupy")
    if cupy is not None:
        return int(cupy.cuda.runtime.getDeviceCount())
    return 0


def default_devices(topology: Topology) -> tuple[str, ...]:
    """One device for this rank: its share of the node's GPUs by local rank, else the CPU."""
    gpus = num_gpus()
    return (f"cuda:{topology.local_rank % gpus}",) if gpus else ("cpu:0",)
