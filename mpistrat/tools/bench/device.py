"""Where the operands of a benchmark lie, and how it waits there."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass

import numpy as np

from mpistrat.arrays import Array
from mpistrat.machine.devices import check_device
from mpistrat.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from mpistrat.tools.bench.errors import CannotTakePart, UsageError
from mpistrat.tools.bench.rounds import all_ranks, first_reason


@dataclass(frozen=True)
class Device:
    """Where this rank's operands lie.

    Attributes:
        name: such as "cpu:0" or "cuda:1".
    """

    name: str = "cpu:0"

    @property
    def kind(self) -> str:
        """Such as "cpu" or "cuda"."""
        return self.name.partition(":")[0]

    @property
    def is_host(self) -> bool:
        return self.kind == "cpu"

    def array(self, values: np.ndarray) -> Array:
        """A copy of `values` there: a NumPy array, or a tensor in a device's memory."""
        if self.is_host:
            return values.copy()
        import torch

        return torch.from_numpy(values).to(self.name)

    def wait(self) -> None:
        """Return when the device has nothing more to do, on any stream."""
        if not self.is_host:
            sys.modules["torch"].accelerator.synchronize(self.name)

    def __str__(self) -> str:
        """For people: "host memory", or the name of the device and of its hardware."""
        if self.is_host:
            return "host memory"
        module = sys.modules["torch"].get_device_module(self.kind)
        hardware = getattr(module, "get_device_name", lambda name: "")(self.name)
        return f"{self.name} ({hardware})" if hardware else self.name


HOST = Device()


def device_named(wanted: str) -> Device:
    """This rank's device, which it takes for good. Called by: every rank.

    Args:
        wanted: "cpu"; "cuda" or another kind: the accelerator of this kind that is this rank's share of its node's;
            "cuda:1": this one on every rank; "auto": this rank's share of the accelerators, the host if there are none.
    Raises: UsageError on all ranks, where one of them has no such device, or another kind than the others.
    """
    if wanted == HOST.kind:
        return HOST
    with contextlib.suppress(ImportError):  # without torch, accelerators are not looked for
        import torch  # noqa: F401
    mistake, devices = "", None
    try:
        if wanted != "auto":
            checked = check_device(wanted)
            devices = [checked] if ":" in wanted else None
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


def check_on_host(device: object) -> None:
    """Raises: CannotTakePart on all ranks, for a peer that is only compared on CPUs."""
    if not str(device).startswith("cpu"):
        raise CannotTakePart(f"is compared on CPUs only, not on {device}")
