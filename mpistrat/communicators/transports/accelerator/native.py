"""Tensors on accelerators through torch's own process groups: NCCL (also RCCL), XCCL, or another backend of torch.

This file's imports load mpi4py. So it is imported on first use only: `import mpistrat` starts no MPI.
"""

from __future__ import annotations

import contextlib
import datetime
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from mpistrat.arrays import Array, dtype_name
from mpistrat.communicators.collectives.all_gather_into import AllGatherInto
from mpistrat.communicators.collectives.all_reduce import AllReduce
from mpistrat.communicators.collectives.all_to_all import AllToAll
from mpistrat.communicators.collectives.reduce import Reduce
from mpistrat.communicators.collectives.reduce_scatter import ReduceScatter
from mpistrat.communicators.communicator import Communicator
from mpistrat.communicators.reduction import Reduction
from mpistrat.communicators.reduction.arithmetic import SUMMED_AS_FLOAT32, scale
from mpistrat.communicators.torch_store import Ranks, opener_of_store
from mpistrat.communicators.transport import Moves
from mpistrat.communicators.transports.accelerator.buffers import DeviceTransport
from mpistrat.communicators.transports.accelerator.collective_group import CollectiveGroup
from mpistrat.communicators.transports.accelerator.library import TorchLibrary
from mpistrat.communicators.transports.accelerator.pending_calls import PendingCalls
from mpistrat.communicators.transports.accelerator.torch_groups import abort_group, make_group
from mpistrat.errors import OpError
from mpistrat.liveness import deadlines
from mpistrat.liveness.ending.abort_channel import AbortChannel
from mpistrat.liveness.ending.job_end import job_end
from mpistrat.liveness.records.watch import CommunicatorWatch
from mpistrat.machine.devices import nccl_that_outlives_errors
from mpistrat.settings import start_seconds

OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
# The dtypes that every group combines. Complex numbers are added up as pairs of floats.
DTYPES = ("int8", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
# A sum in another dtype copies this many elements at a time, so that the copy stays small beside the buffer.
MOST_COPIED = 1 << 22
# Long, so that our observer reports stalls: torch's watchdog ends the process without a word about other ranks.
TIMEOUT = datetime.timedelta(seconds=deadlines.RANK_WAITS_FOR_NATIVE_GROUP)


class NativeTransport(DeviceTransport):
    """Moves tensors on the accelerator that this rank has for itself, through torch's own process group.

    The call of a collective returns when it is submitted; the host does not wait. The group's stream runs the
    collective after the work that the caller's current stream holds now. Work that the program submits to the current
    stream later runs after the collective.

    Floats of 16 bits are summed as float32, unless the reduction names another dtype. Values that the group does not
    combine (booleans, integers of 16 bits, products of complex numbers, bitwise operations) go through the host.

    An error on one rank, or a stall with MPISTRAT_ON_STALL=raise, aborts the group on all ranks. After that, every
    collective on tensors of the accelerator raises an error.

    Args:
        host: the communicator of the ranks that this transport connects, for buffers on the host and objects.
        kind: torch's name for the kind of device: "cuda".
        index: the number of this rank's accelerator in this process.
        watch: the watch of `host`, where a waiting rank is reported.
        why: why this transport was chosen, in words for people.
        channel: the abort channel between the ranks of `host`: it carries a rank's error to the other ranks.
        pending: makes the `PendingCalls` of a group.
    """

    ordered_by_streams = True

    def __init__(
        self,
        host: Communicator,
        kind: str,
        index: int,
        watch: CommunicatorWatch,
        why: str,
        channel: AbortChannel,
        pending: Callable[[CollectiveGroup[Any]], PendingCalls],
    ) -> None:
        super().__init__(host, index, watch, why)
        self._kind = kind
        self._device = torch.device(kind, index)
        self._library_of_device = TorchLibrary(kind, index)
        self._group: CollectiveGroup[Any] = CollectiveGroup(
            f"torch's group for {kind!r}", host, channel, watch, abort_group
        )
        self._pending = pending(self._group)

    def start(self, ranks: Ranks) -> str:
        """Join the ranks in a group, and try a first reduction. Collective. Called by: `gpu_transports`, once.

        Args: ranks: the ranks of `host`, for the store through which torch's group forms.
        Returns: why the group cannot be used, the same text on all ranks; "" if it can be used.
        """
        try:
            open_store = opener_of_store(ranks)
        except RuntimeError as error:  # all ranks get it: the nodes do not reach each other
            return str(error)

        def make() -> Any:
            store = open_store()
            if seconds := start_seconds():
                store.set_timeout(datetime.timedelta(seconds=seconds))
            name = f"mpistrat {self._pending.name}"
            with self._library_of_device.device(), nccl_that_outlives_errors():
                return make_group(self._kind, store, self.rank, self.size, TIMEOUT, name)

        def sum_of_ones(group: Any) -> float:
            with self._library_of_device.device():
                ones = torch.ones(1, dtype=torch.float32, device=self._device)
                group.allreduce([ones], dist.AllreduceOptions()).wait()
                return ones.item()

        why_not = self._group.start(make, sum_of_ones)
        if not why_not:
            job_end().call_last(self._shut_down)
        return why_not

    # These replace the copies through the host

    def all_reduce(self, collective: AllReduce) -> None:
        buffer = collective.buffer
        reduction = collective.reduction
        if not _is_combined_as_it_is(collective, self._device):
            super().all_reduce(collective)
            return
        # This repeats `_combine` and `_submit`, to spare each gradient two Python calls.
        options = dist.AllreduceOptions()
        with self._group as group:
            group.allreduce([buffer], options).wait()
            self._pending.add()
        scale(buffer, reduction.scale)

    def _combine(self, buffer: Array, reduction: Reduction) -> None:
        if not buffer.numel():
            return
        dtype = _summed_as(buffer, reduction)
        if dtype != buffer.dtype:
            for part in buffer.detach().view(-1).split(MOST_COPIED):
                copied = part.to(dtype)
                self._combine_numbers(copied, copied, reduction)
                part.copy_(copied)
            return
        numbers = _numbers_of(buffer, reduction)
        if numbers is None:
            self.combine_on_host(buffer, reduction)
        else:
            self._combine_numbers(buffer, numbers, reduction)

    def _combine_numbers(self, buffer: Array, numbers: Array, reduction: Reduction) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = OPS[reduction.op]
        self._submit(lambda group: group.allreduce([numbers], options))
        scale(buffer, reduction.scale)

    def _spread(self, buffer: Array, root: int) -> None:
        if not buffer.numel():
            return
        options = dist.BroadcastOptions()
        options.rootRank = root
        memory = _bytes_of(buffer)
        self._submit(lambda group: group.broadcast([memory], options))

    def _gather(self, buffer: Array) -> list[Array]:
        shapes = self.host.all_gather_object(tuple(buffer.shape))
        if len(set(shapes)) == 1:
            rows = buffer.new_empty((self.size, *buffer.shape))
            self.all_gather_into(AllGatherInto(buffer, rows))
            return list(rows.unbind())
        parts = [buffer.new_empty(shape) for shape in shapes]
        parts[self.rank].copy_(buffer)
        for root, part in enumerate(parts):
            self._spread(part, root)
        return parts

    def reduce(self, collective: Reduce) -> None:
        buffer = collective.buffer
        reduction = collective.reduction.plain
        root = collective.root
        summed = buffer.detach().to(_summed_as(buffer, reduction))
        numbers = _numbers_of(summed, reduction)
        if numbers is None or not _are_on(self._device, buffer):
            collective.by_others(self)
        elif buffer.numel():
            options = dist.ReduceOptions()
            options.reduceOp = OPS[reduction.op]
            options.rootRank = root
            self._submit(lambda group: group.reduce([numbers], options))
            if summed.dtype != buffer.dtype and self.rank == root:
                buffer.copy_(summed)

    def reduce_scatter(self, collective: ReduceScatter) -> None:
        buffer = collective.buffer
        reduction = collective.reduction.plain
        out = collective.out
        dtype = _summed_as(buffer, reduction)
        summed = out if dtype == out.dtype else out.new_empty(out.shape, dtype=dtype)
        numbers = _numbers_of(buffer.detach().to(dtype), reduction)
        result = _numbers_of(summed, reduction)
        if numbers is None or not _are_on(self._device, buffer, out):
            collective.by_others(self)
        elif buffer.numel():
            options = dist.ReduceScatterOptions()
            options.reduceOp = OPS[reduction.op]
            self._submit(lambda group: group._reduce_scatter_base(result, numbers, options))
            if summed is not out:
                out.copy_(summed)

    def all_gather_into(self, collective: AllGatherInto) -> None:
        buffer = collective.buffer
        out = collective.out
        if not _are_on(self._device, buffer, out):
            collective.by_others(self)
        elif buffer.numel():
            options = c10d.AllgatherOptions()
            whole = _bytes_of(out)
            part = _bytes_of(buffer)
            self._submit(lambda group: group._allgather_base(whole, part, options))

    def all_to_all(self, collective: AllToAll) -> None:
        if not _are_on(self._device, collective.buffer, collective.out):
            super().all_to_all(collective)
        elif collective.row_bytes:
            rows = _rows_of(collective.buffer)
            received = _rows_of(collective.out)
            counts = list(collective.received), list(collective.sent)
            options = dist.AllToAllOptions()
            self._submit(lambda group: group.alltoall_base(received, rows, *counts, options))

    moves: ClassVar[Moves] = {
        **DeviceTransport.moves,
        AllReduce: all_reduce,
        Reduce: reduce,
        ReduceScatter: reduce_scatter,
        AllGatherInto: all_gather_into,
        AllToAll: all_to_all,
    }

    # Parts of the collectives

    def _submit(self, call: Callable[[Any], Any]) -> None:
        """Submit a collective to the group. Does not wait.

        It runs after the work that the current stream holds now, and before the work that is submitted there later.
        Args: call: takes torch's process group, starts the collective, and returns torch's `Work`.
        Raises: the error that aborted the group.
        """
        with self._group as group:
            call(group).wait()  # the stream waits, not the host
            self._pending.add()

    def wait(self, library: Any, event: Any) -> None:
        with self._group:
            self._group.wait_until(lambda: library.is_done(event))

    def _shut_down(self) -> None:
        """Shut the group down. Called by: `job_end`, on each rank, when the programs of all ranks have ended.

        Raises nothing if the group was aborted.
        """
        with contextlib.suppress(RuntimeError, OpError):  # an abort has been reported already
            self.wait_until_idle()
            with self._group as group:
                group.shutdown()

    def wait_until_idle(self) -> None:
        """Wait until all collectives that this rank has submitted have ended on the accelerator.

        Called by: `LibraryDispatcher` and `HierarchicalDeviceTransport`, before CuPy or MPI uses the accelerator.
        Raises: RuntimeError, StallError or RankLostError if the group was or is aborted.
        """
        with self._group:
            self._group.wait_until(self._pending.are_done)


def _are_on(device: torch.device, *buffers: Array) -> bool:
    return {buffer.device for buffer in buffers} == {device}


def _is_combined_as_it_is(collective: AllReduce, device: torch.device) -> bool:
    """Return whether the group can sum the buffer in place, by a plain all-reduce in the buffer's own dtype.

    False, among others, for another reduction than a sum, with an `out` or a compressor, and for an empty buffer.
    """
    buffer = collective.buffer
    reduction = collective.reduction
    kind = reduction.op, reduction.compressor, collective.out
    return (
        kind == ("sum", None, None)
        and buffer.device == device
        and dtype_name(buffer) in DTYPES
        and _summed_as(buffer, reduction) == buffer.dtype
        and buffer.numel() > 0
        and not buffer.requires_grad
    )


def _summed_as(buffer: Array, reduction: Reduction) -> torch.dtype:
    """Return the dtype in which the numbers of `buffer` are combined. The caller then rounds to the buffer's dtype.

    It is `reduction.summed_in` for floats of at most 32 bits, if that is set; else float32 for floats of 8 and 16 bits,
    and the buffer's own dtype for all others.
    """
    short = dtype_name(buffer).startswith(SUMMED_AS_FLOAT32)
    if reduction.summed_in and (short or buffer.dtype == torch.float32):
        return getattr(torch, reduction.summed_in)
    return torch.float32 if short else buffer.dtype


def _numbers_of(buffer: Array, reduction: Reduction) -> Array | None:
    """Return a flat view of `buffer` that the group can combine; for sums, a complex number becomes two floats.

    None if the group cannot combine this dtype by this operation; the caller then combines on the host.
    """
    flat = buffer.detach().view(-1)
    if flat.is_complex() and reduction.op == "sum":
        flat = torch.view_as_real(flat).view(-1)
    known = dtype_name(flat) in DTYPES and reduction.op in OPS
    return flat if known else None


def _bytes_of(buffer: Array) -> Array:
    return buffer.detach().view(-1).view(torch.uint8)


def _rows_of(buffer: Array) -> Array:
    """Return a view of `buffer` as uint8, of shape [rows, bytes of a row]. Rows lie along the first dimension."""
    shape = buffer.shape[0], math.prod(buffer.shape[1:])
    return buffer.detach().view(shape).view(torch.uint8)
