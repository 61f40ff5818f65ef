"""torch's own groups: they move the memory of accelerators for a process group of ours."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from mpistrat.communicators.transports.accelerator.torch_groups import abort_group, make_group


class NativeGroups:
    """torch's own groups over the ranks of a process group, one for each kind of device.

    Each is made when the first tensor of its device comes; this is collective.

    Attributes:
        store: the store of this process group alone.
        while_made: makes the context for the creation of torch's groups.
    """

    while_made: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def __init__(
        self, store: c10d.Store, rank: int, size: int, timeout: datetime.timedelta, name: str
    ) -> None:
        self.store = store
        self._args = store, rank, size, timeout, name
        self._groups: dict[str, Any] = {}

    def of(self, device: torch.device) -> Any:
        """Return the group that moves tensors of `device`. Raises: RuntimeError if this torch has none."""
        group = self._groups.get(device.type)
        if group is None:
            with self.while_made():
                group = self._groups[device.type] = make_group(device.type, *self._args)
        return group

    def shut_down(self) -> None:
        for group in self._groups.values():
            group.shutdown()
        self._groups.clear()

    def abort(self) -> None:
        """Abort all calls of torch's groups at once. Called by: any thread, before it is told that a rank is lost."""
        for group in list(self._groups.values()):
            abort_group(group)
        self._groups.clear()
