"""The device that holds a benchmark's operands, and how the benchmark waits for it."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

from mpistrat.arrays import Array


@dataclass(frozen=True)
class Device:
    """The device that holds this rank's operands.

    Attributes:
        name: such as "cpu:0" or "cuda:1".
    """

    name: str = "cpu:0"

    @property
    def kind(self) -> str:
        """The kind of device, such as "cpu" or "cuda"."""
        return self.name.partition(":")[0]

    @property
    def is_host(self) -> bool:
        return self.kind == "cpu"

    def array(self, values: np.ndarray) -> Array:
        """Return a copy of `values` on the device: a NumPy array for the host, else a torch tensor."""
        if self.is_host:
            return values.copy()
        import torch

        return torch.from_numpy(values).to(self.name)

    def wait(self) -> None:
        """Wait until the device has finished the work on all its streams. Returns at once for the host."""
        if not self.is_host:
            sys.modules["torch"].accelerator.synchronize(self.name)

    def __str__(self) -> str:
        """Return the device in words: "host memory" for a CPU, else "cuda:0 (NVIDIA H100)", or the name alone."""
        if self.is_host:
            return "host memory"
        module = sys.modules["torch"].get_device_module(self.kind)
        hardware = getattr(module, "get_device_name", lambda name: "")(self.name)
        return f"{self.name} ({hardware})" if hardware else self.name


HOST = Device()
