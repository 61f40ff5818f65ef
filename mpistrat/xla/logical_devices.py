"""One replica over several devices of a rank, its logical devices: one program on whole tensors, which XLA cuts apart.

The program says of some tensors how they are to be laid out, and XLA finds the rest, and what is exchanged between
the devices. Values are the same as on one device, up to rounding. (GSPMD, arxiv.org/abs/2105.04663.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpistrat import arrays
from mpistrat.liveness.ending.rank_end import rank_end
from mpistrat.machine.notices import tell
from mpistrat.xla.runtime import Runtime
from mpistrat.xla.topology.logical_devices import check_logical_device, check_split


class LogicalDevices:
    """Called by: the thread that runs the program.

    What is laid out, and returned, depends on where the program says it. Outside a step a parameter, or another leaf
    of autograd that is no view, is itself laid out, so that each device holds its part only, and is returned. Of other
    tensors, and inside a step of all, a copy is returned that is laid out as said, as its gradient is; the tensor given
    stays as it is, and nothing is moved through the host.

    A tensor keeps its layout in the steps that change it. One that has none before its first step (that of a module's
    `to`; `Runtime.put` makes whole ones) gets from XLA what fits, and the second step is then another graph: whoever
    wants one compilation lays out, or makes whole, all that the steps keep.

    Args:
        runtime: with `spmd` and `count` devices, where `count` is more than 1; else it is not used.
        count: the logical devices of the replica. With 1 there is nothing to lay out, and arguments are checked only.
    """

    def __init__(self, runtime: Runtime, count: int) -> None:
        if count != 1 and count != runtime.num_all_devices:
            raise ValueError(
                f"a replica of {count} logical devices is to have all devices that XLA gives this process, "
                f"which are {runtime.num_all_devices}"
            )
        self._runtime = runtime
        self._count = count
        self._has_warned = False

    def assign(self, tensor: Any, logical_device_id: int) -> Any:
        """`tensor`, for one logical device; with several all of them have it, which a line on stderr says once.

        torch_xla has no layout on one device: it takes one for all.
        Raises: ValueError where the replica has no such device, and for a tensor of another device.
        """
        check_logical_device(logical_device_id, self._count)
        if self._count > 1 and not self._has_warned and rank_end().rank == 0:
            self._has_warned = True
            tell(
                f"experimental_assign_to_logical_device: torch_xla keeps no value on one of a replica's {self._count} "
                "logical devices, so each of them has it, and computes what is made of it; to share the work out, use "
                "experimental_split_to_logical_devices"
            )
        return self.replicate(tensor)

    def split(self, tensor: Any, partition_dimensions: Sequence[int]) -> Any:
        """`tensor`, dimension d cut into `partition_dimensions[d]` parts, which the devices have in row-major order.

        Raises: ValueError unless it divides into one part per logical device, and for a tensor of another device.
        """
        parts = check_split(tuple(tensor.shape), partition_dimensions, self._count)
        return self._lay_out(tensor, parts, range(len(parts)))

    def replicate(self, tensor: Any) -> Any:
        """`tensor`, all of it on each logical device.

        Raises: ValueError for a tensor of another device.
        """
        return self._lay_out(tensor, (self._count,), (None,) * len(tensor.shape))

    def _lay_out(self, tensor: Any, mesh: Sequence[int], cut: Sequence[int | None]) -> Any:
        if self._count == 1:
            return tensor
        if not arrays.is_on_xla(tensor):
            where = tensor.device if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise ValueError(
                f"only a tensor on the replica's device can be laid out over its logical devices, and this is on "
                f"{where}: move it there first, tensor.to({str(self._runtime.device(0))!r})"
            )
        sharding = self._runtime.layouts.sharding(mesh, cut)
        if tensor.is_leaf and not tensor._is_view() and not self._runtime.graphs.recording:
            self._runtime.layouts.spread(tensor, sharding)
            return tensor
        return _LaidOut.apply(tensor, self._runtime, sharding)


class _LaidOut(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, runtime: Runtime, sharding: Any) -> Any:
        context.runtime, context.sharding = runtime, sharding
        return runtime.layouts.spread_copy(tensor, sharding)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        return context.runtime.layouts.spread_copy(gradient, context.sharding), None, None
