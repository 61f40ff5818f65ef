"""torch's own process groups, such as NCCL's. They move tensors of accelerators for a process group of ours."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from mpistrat.communicators.transports.accelerator.torch_groups import abort_group, make_group


class NativeGroups:
    """torch's own process groups over the ranks of a process group of ours, one for each type of device.

    Args:
        store: torch's store of our process group; the ranks find each other by it.
        rank, size: this process's rank in the group, and the number of ranks.
        timeout: the timeout of torch's groups.
        name: the name of our process group.

    Attributes:
        store: the argument `store`.
        while_made: returns a context manager that is entered while a group of torch is made.
    """

    while_made: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def __init__(
        self, store: c10d.Store, rank: int, size: int, timeout: datetime.timedelta, name: str
    ) -> None:
        self.store = store
        self._args = store, rank, size, timeout, name
        self._groups: dict[str, Any] = {}

    def of(self, device: torch.device) -> Any:
        """Return torch's group that moves tensors of `device`.

        The first call for a type of device makes the group. That is collective.
        Raises: RuntimeError if this torch has no backend for the device.
        """
        group = self._groups.get(device.type)
        if group is None:
            with self.while_made():
                group = make_group(device.type, *self._args)
                self._groups[device.type] = group
        return group

    def shut_down(self) -> None:
        for group in self._groups.values():
            group.shutdown()
        self._groups.clear()

    def abort(self) -> None:
        """Abort torch's groups, so that their running calls end immediately. The next call of `of` makes a new group.

        Called by: the abort of the process group; and any thread, when a rank is lost, before calls raise.
        """
        for group in list(self._groups.values()):
            abort_group(group)
        self._groups.clear()
