"""Choose each rank's device by the option `--device`."""

from __future__ import annotations

import contextlib

from mpistrat.machine.devices import check_device
from mpistrat.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from mpistrat.tools.bench.device import HOST, Device
from mpistrat.tools.bench.rounds import UsageError, all_ranks, first_reason


def device_named(wanted: str) -> Device:
    """Choose this rank's device for the whole run. Called by: every rank.

    An accelerator also becomes torch's current device.
    Args:
        wanted: "cpu"; "cuda" or another kind: one of the node's accelerators of this kind, shared out among the ranks;
            "cuda:1": this device on every rank; "auto": one of the node's accelerators, or the host if there are none.
    Raises: UsageError on all ranks, if a rank lacks the device or the ranks have devices of several kinds.
    """
    if wanted == HOST.kind:
        return HOST
    with contextlib.suppress(ImportError):  # without torch, no accelerator is used
        import torch  # noqa: F401
    mistake = ""
    devices = None
    try:
        if wanted != "auto":
            checked = check_device(wanted)
            if ":" in wanted:
                devices = [checked]
    except ValueError as error:
        mistake = f"rank {all_ranks().rank}: {error}"
    if mistake := first_reason(mistake):
        raise UsageError(f"--device {wanted}: {mistake}")
    strategy = MultiWorkerMirroredStrategy(devices=devices)
    device = Device(strategy.extended.worker_devices[0])
    kinds = all_ranks().all_gather_object(device.kind)
    if len(set(kinds)) > 1:
        raise UsageError(
            f"--device {wanted}: the ranks have devices of several kinds: {', '.join(kinds)}; --device cpu measures "
            "the host memory of all of them"
        )
    return device
