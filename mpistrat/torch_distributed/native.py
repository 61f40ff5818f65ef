"""The groups that torch has for the memory of accelerators: NCCL (also RCCL) and XCCL."""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

# By the type of a tensor's device: what torch calls its own group. RCCL comes by NCCL's name.
_NATIVE = {"cuda": "ProcessGroupNCCL", "xpu": "ProcessGroupXCCL"}


class NativeGroups:
    """torch's own groups over the same ranks, each made when the first tensor of its device comes; that is collective.

    Args:
        store: of this group alone.
    """

    def __init__(
        self, store: c10d.Store, rank: int, size: int, timeout: datetime.timedelta, name: str
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._timeout, self._name = timeout, name
        self._groups: dict[str, Any] = {}

    def of(self, device: torch.device) -> Any:
        """The group that moves tensors of `device`. Raises: RuntimeError where this torch has none."""
        group = self._groups.get(device.type)
        if group is None:
            group = self._groups[device.type] = self._make(device.type)
        return group

    def shut_down(self) -> None:
        for group in self._groups.values():
            group.shutdown()
        self._groups.clear()

    def _make(self, kind: str) -> Any:
        module = dist.distributed_c10d
        cls = getattr(module, _NATIVE.get(kind, ""), None)
        if cls is None:
            raise RuntimeError(
                f"rank {self._rank}: the backend mpistrat moves tensors in CPU memory itself, and those of a device by "
                f"torch's own group; this torch has none for {kind!r}. Move the tensor to the CPU, or install a torch "
                "with NCCL (CUDA, ROCm) or XCCL (XPU)"
            )
        options = cls.Options()
        options._timeout = self._timeout
        options.group_name = self._name
        store = c10d.PrefixStore(f"{kind}/", self._store)
        return cls(store, self._rank, self._size, options)
