"""Combines tensors on XLA devices with XLA's own collectives, inside the graph."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from mpistrat.arrays import Array, dtype_name, is_on_xla, to_device_of, to_host
from mpistrat.communicators.collectives.all_gather import AllGather
from mpistrat.communicators.collectives.all_gather_into import AllGatherInto
from mpistrat.communicators.collectives.all_reduce import AllReduce
from mpistrat.communicators.collectives.all_to_all import AllToAll
from mpistrat.communicators.collectives.broadcast import Broadcast
from mpistrat.communicators.collectives.collective import Collective
from mpistrat.communicators.collectives.reduce import Reduce
from mpistrat.communicators.collectives.reduce_scatter import ReduceScatter
from mpistrat.communicators.communicator import Communicator
from mpistrat.communicators.reduction import Reduction
from mpistrat.communicators.router import Router
from mpistrat.communicators.transport import Moves, Transport, by_others
from mpistrat.communicators.transports.accelerator.buffers import exchange_on_host
from mpistrat.machine.notices import tell

if TYPE_CHECKING:
    from mpistrat.xla.runtime import Runtime

# (a part of a reason that `wrong_sum` returns, advice). `use_xla` prints the first entry with a part of its reason.
_FIXES = (
    (" knows of ", "Start one rank per chip, or one per host, on all hosts of the slice"),
    (" of the job,", "Build the strategy over all ranks"),
    ("use_spmd()", "Leave that call out"),
    (" of the rank's ", "Start one rank per chip, or give the replicas all cores of each rank"),
    ("", "Install the same torch_xla and libtpu on all hosts; TF_CPP_MIN_LOG_LEVEL=0 shows more"),
)
tell_once = functools.cache(tell)
_OPS = ("sum", "max", "min")  # XLA's operations; the host does all other ones


class XlaTransport(Transport):
    """Combines tensors on XLA devices between ranks: records reductions in XLA's graph, with XLA's own collectives.

    Outside a step (a call of `run`'s function) each reduction starts at once: see `Runtime.all_reduce`. Broadcasts,
    gathers, exchanges of rows, sums with a compressor, and operations other than sum, max and min go through host
    memory.

    Made by: `use_xla`.
    Args:
        host: a communicator of the ranks that this transport connects; it moves buffers of the host.
    """

    takes_device_buffers = True

    def __init__(self, host: Communicator, runtime: Runtime) -> None:
        self._host = host
        self._runtime = runtime
        self.rank = host.rank
        self.size = host.size

    def takes(self, collective: Collective) -> bool:
        return is_on_xla(collective.buffer)

    def all_reduce(self, collective: AllReduce) -> None:
        buffer = collective.buffer
        reduction = collective.reduction
        target = collective.target
        if reduction.compressor is not None:
            host = to_host(buffer)
            self._host.all_reduce(host, reduction)
            target.copy_(to_device_of(host, buffer))
            return
        if dtype_name(buffer) in ("bfloat16", "float16"):
            buffer = buffer.float()
        total = self._sum(buffer, reduction)
        if reduction.scale is not None:
            total = total * reduction.scale
        target.copy_(total)

    def reduce(self, collective: Reduce) -> None:
        total = self._sum(collective.buffer, collective.reduction)
        if self.rank == collective.root:
            collective.buffer.copy_(total)

    def reduce_scatter(self, collective: ReduceScatter) -> None:
        total = self._sum(collective.buffer, collective.reduction)
        out = collective.out
        length = math.prod(out.shape[:1])  # a number has one row
        start = self.rank * length
        rows = total[start : start + length]
        out.copy_(rows.reshape(out.shape))

    def _sum(self, buffer: Array, reduction: Reduction) -> Array:
        """Return the ranks' buffers, reduced without `reduction.scale`, as a new tensor."""
        if reduction.op not in _OPS:
            host = to_host(buffer)
            self._host.all_reduce(host, reduction.plain)
            return to_device_of(host, buffer)
        (total,) = self._runtime.all_reduce(reduction.op, [buffer])
        return total

    def broadcast(self, collective: Broadcast) -> None:
        host = to_host(collective.buffer)
        self._host.broadcast(host, collective.root)
        collective.buffer.copy_(to_device_of(host, collective.buffer))

    def all_gather(self, collective: AllGather) -> list[Array]:
        buffer = collective.buffer
        return [to_device_of(part, buffer) for part in self._host.all_gather(to_host(buffer))]

    def all_to_all(self, collective: AllToAll) -> None:
        exchange_on_host(self._host, collective)

    moves: ClassVar[Moves] = {
        AllReduce: all_reduce,
        Reduce: reduce,
        ReduceScatter: reduce_scatter,
        Broadcast: broadcast,
        AllGather: all_gather,
        AllGatherInto: by_others,
        AllToAll: all_to_all,
    }

    def explain(self, rest: str) -> str:
        return (
            "tensors on XLA devices: by XLA's collectives, inside the graph; a first sum was right\n"
            f"buffers on the host: {rest}"
        )


def use_xla(communicator: Communicator, runtime: Runtime) -> str:
    """Let `communicator` combine tensors on XLA devices with XLA's collectives, if a sum on trial is right.

    Called by: `TPUStrategy`, on every rank, if there are several.
    Returns: "" on success. Else the reason why these tensors go through host memory; the same on all ranks. Except on
        the CPU device, rank 0 also prints the reason.
    """
    assert isinstance(communicator, Router), "one rank alone moves nothing"
    wrong = wrong_sum(communicator, runtime)
    if not wrong:
        communicator.move_by(XlaTransport(Router(communicator.transports), runtime))
    # The CPU device is for trials, and never connects ranks.
    elif communicator.rank == 0 and runtime.kind != "CPU":
        fix = next(fix for part, fix in _FIXES if part in wrong)
        tell_once(
            f"values on {runtime.kind}s go through host memory and MPI, not through XLA, because {wrong}. {fix}."
        )
    return wrong


def wrong_sum(communicator: Communicator, runtime: Runtime) -> str:
    """Try a sum over all ranks with XLA, and compare it with the expected sum.

    XLA's CPU device returns the operand as if there were no other process, or aborts. So nothing is summed if XLA knows
    fewer devices than the ranks have.
    Called by: every rank.
    Returns: "" if the sum was right on all ranks. Else why XLA cannot sum, as a part of a sentence that names the first
        rank with the fault; the same on all ranks.
    """
    size = communicator.size
    counts = communicator.all_gather_object(
        (runtime.num_all_devices, runtime.num_devices), label="devices that XLA knows"
    )
    known, of_ranks = zip(*counts, strict=True)
    present = sum(of_ranks)
    least = min(known)
    if least < present:
        return f"XLA on rank {known.index(least)} knows of {least} of the ranks' {present} devices"
    if max(known) > present:
        return f"XLA sums over all {max(known)} devices of the job, of which these ranks have {present}"
    with communicator.raising_together():
        own_reason = runtime.connect()
    reasons = communicator.all_gather_object(own_reason, label="why XLA sums nothing")
    for rank, reason in enumerate(reasons):
        if reason:
            return f"{reason} (rank {rank})"
    sum_of_numbers = sum(range(1, size + 1))
    sum_of_squares = sum(rank * rank for rank in range(size))
    expected = [float(sum_of_numbers), float(sum_of_squares)]
    got = probe(communicator.rank, runtime)
    sums_of_ranks = communicator.all_gather_object(got, label="sums by XLA")
    for rank, sums in enumerate(sums_of_ranks):
        if sums != expected:
            return (
                f"XLA's sum over the ranks was {sums} on rank {rank}, where {expected} was expected"
            )
    return ""


def probe(rank: int, runtime: Runtime) -> Sequence[float] | str:
    """Sum (rank + 1) and rank² over all ranks with XLA. Called by: every rank.

    Returns: a list of the two sums, or the text of the error if XLA raised one.
    """
    import torch

    try:
        numbers = torch.tensor([rank + 1, rank * rank], dtype=torch.float32, device="cpu")
        (operand,) = runtime.put([numbers], runtime.device(0))
        (total,) = runtime.all_reduce("sum", [operand])
        return [float(value) for value in runtime.fetch([total])[0]]
    except Exception as error:  # XLA raises errors of many classes
        return f"no value ({str(error).splitlines()[0]})"
