"""One replica over several devices of a rank, its logical devices. The program works on whole tensors; XLA splits them.

The program gives the layout of some tensors. XLA chooses the layout of all other tensors, and adds the exchanges
between the devices. Values are the same as on one device, up to rounding. (GSPMD, arxiv.org/abs/2105.04663.)
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
    """Lays tensors out over the logical devices of this rank's replica: all XLA devices of the process.

    Outside a step (one call of `run`'s function), the methods lay out a parameter, or another autograd leaf that is no
    view, in place, and return the parameter itself: each device then holds its part only. For any other tensor, and
    inside a step, the methods return a copy with the layout; the copy's gradient gets the same layout. The argument
    then keeps its layout, and nothing moves through the host.

    A tensor keeps its layout in the steps that change it. If a tensor has no layout before its first step (as after a
    module's `to`), XLA chooses one in that step, and the second step compiles another graph. To compile once, lay out
    or replicate every tensor that the steps keep.

    Called by: the experimental_…_logical_device methods of `TPUStrategy`.
    Args:
        runtime: the XLA runtime; if `count` is above 1, the runtime has `spmd` and exactly `count` devices.
        count: number of logical devices of the replica. With 1, the methods only check their arguments, and return the
            tensor itself.
    Raises: ValueError if `count` is neither 1 nor the number of devices that XLA knows.
    """

    def __init__(self, runtime: Runtime, count: int) -> None:
        # For one logical device the runtime is not asked, because an answer would start it.
        if count != 1 and count != runtime.num_all_devices:
            raise ValueError(
                f"a replica of {count} logical devices is to have all devices that XLA gives this process, and XLA "
                f"gives it {runtime.num_all_devices}"
            )
        self._runtime = runtime
        self._count = count
        self._has_warned = False

    def assign(self, tensor: Any, logical_device_id: int) -> Any:
        """Put the whole `tensor` on all logical devices, because torch_xla has no layout for a single device.

        With several logical devices, rank 0 says so once on stderr.
        Returns: the tensor or a copy: see the class.
        Raises: ValueError if the replica has no device `logical_device_id`, or if it has several and `tensor` is not on
            XLA devices.
        """
        check_logical_device(logical_device_id, self._count)
        if self._count > 1 and not self._has_warned and rank_end().rank == 0:
            self._has_warned = True
            tell(
                f"experimental_assign_to_logical_device: torch_xla keeps no value on one of a replica's {self._count} "
                "logical devices, so each of them has it and repeats the computations with it; to share the work, use "
                "experimental_split_to_logical_devices"
            )
        return self.replicate(tensor)

    def split(self, tensor: Any, partition_dimensions: Sequence[int]) -> Any:
        """Cut dimension d of `tensor` into `partition_dimensions[d]` parts; each device gets one, in row-major order.

        Returns: the tensor or a copy: see the class.
        Raises: ValueError if the parts are not equal, or if there is not one part per logical device; with several
            logical devices also if `tensor` is not on XLA devices.
        """
        parts = check_split(tuple(tensor.shape), partition_dimensions, self._count)
        return self._lay_out(tensor, parts, range(len(parts)))

    def replicate(self, tensor: Any) -> Any:
        """Put the whole `tensor` on each logical device.

        Returns: the tensor or a copy: see the class.
        Raises: ValueError if the replica has several logical devices, and `tensor` is not on XLA devices.
        """
        uncut = (None,) * len(tensor.shape)
        return self._lay_out(tensor, (self._count,), uncut)

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
        context.runtime = runtime
        context.sharding = sharding
        return runtime.layouts.spread_copy(tensor, sharding)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        return context.runtime.layouts.spread_copy(gradient, context.sharding), None, None
