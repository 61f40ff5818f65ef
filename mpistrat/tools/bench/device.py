"""Where the operands of a benchmark lie, and how it waits there."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

from mpistrat.arrays import Array
from mpistrat.tools.bench.errors import CannotTakePart


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


def check_on_host(device: object) -> None:
    """Raises: CannotTakePart on all ranks, for a peer that is only compared on CPUs."""
    if not str(device).startswith("cpu"):
        raise CannotTakePart(f"is compared on CPUs only, not on {device}")
