"""Tensors of XLA devices, combined by XLA's own collectives inside the graph; all else goes by another communicator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpistrat.arrays import Array, dtype_name, is_on_xla, to_device_of, to_host
from mpistrat.communicators.checked import CheckedCommunicator
from mpistrat.communicators.communicator import Communicator, Wire
from mpistrat.communicators.wrapping import BesideHost

if TYPE_CHECKING:
    from mpistrat.xla.runtime import Runtime


class XlaCommunicator(BesideHost):
    """Sums, and the like, of tensors on XLA devices are recorded, as all that is done with them.

    What has no collective of XLA's here (broadcasts, gathered parts, slices in a wire format) goes through host memory.
    """

    def __init__(self, inner: Communicator, runtime: Runtime) -> None:
        super().__init__(inner)
        self._runtime = runtime

    def all_reduce(
        self,
        buffer: Array,
        op: str = "sum",
        *,
        out: Array | None = None,
        label: str = "",
        error: Exception | None = None,
        scale: float | None = None,
        wire: Wire | None = None,
    ) -> None:
        if not is_on_xla(buffer):
            self.inner.all_reduce(buffer, op, out=out, scale=scale, wire=wire)
            return
        target = buffer if out is None else out
        if wire is not None:
            host = to_host(buffer)
            self.inner.all_reduce(host, op, scale=scale, wire=wire)
            target.copy_(to_device_of(host, buffer))
            return
        operand = buffer.float() if dtype_name(buffer) in ("bfloat16", "float16") else buffer
        (total,) = self._runtime.all_reduce(op, [operand])
        target.copy_(total if scale is None else total * scale)

    def reduce(self, buffer: Array, root: int = 0, op: str = "sum", *, label: str = "") -> None:
        if not is_on_xla(buffer):
            self.inner.reduce(buffer, root, op)
            return
        (total,) = self._runtime.all_reduce(op, [buffer])
        if self.rank == root:
            buffer.copy_(total)

    def reduce_scatter(
        self, buffer: Array, out: Array, op: str = "sum", *, label: str = ""
    ) -> None:
        if not is_on_xla(buffer):
            self.inner.reduce_scatter(buffer, out, op)
            return
        (total,) = self._runtime.all_reduce(op, [buffer])
        length = out.shape[0]
        out.copy_(total[self.rank * length : (self.rank + 1) * length])

    def broadcast(self, buffer: Array, root: int = 0, *, label: str = "") -> None:
        if not is_on_xla(buffer):
            self.inner.broadcast(buffer, root)
            return
        host = to_host(buffer)
        self.inner.broadcast(host, root)
        buffer.copy_(to_device_of(host, buffer))

    def all_gather(self, buffer: Array, *, label: str = "") -> list[Array]:
        if not is_on_xla(buffer):
            return self.inner.all_gather(buffer)
        return [to_device_of(part, buffer) for part in self.inner.all_gather(to_host(buffer))]

    def explain(self) -> str:
        return (
            "tensors on XLA devices: by XLA's collectives, inside the graph; a first sum was right\n"
            f"buffers on the host: {self.inner.explain()}"
        )


def use_xla(communicator: CheckedCommunicator, runtime: Runtime) -> str:
    """Have tensors on XLA devices go by XLA's collectives, if they are seen to work. Called by: every rank.

    Returns: why they go through host memory instead; "" where they do not.
    """
    wrong = wrong_sum(communicator, runtime)
    if not wrong:
        communicator.move_by(XlaCommunicator(communicator.inner, runtime))
    return wrong


def wrong_sum(communicator: Communicator, runtime: Runtime) -> str:
    """What XLA made of a sum over all ranks that are known, and "" where it was right, on all of them.

    Its CPU device returns the operand as if there were no other process, or aborts. So what it says of itself does not
    count, and nothing is summed where it knows fewer devices than the ranks have.
    """
    size = communicator.size
    counts = communicator.all_gather_object(
        (runtime.num_all_devices, runtime.num_devices), label="devices that XLA knows"
    )
    known, own = zip(*counts, strict=True)
    if min(known) < sum(own):
        return f"XLA on rank {known.index(min(known))} knows of {min(known)} of the ranks' {sum(own)} devices"
    expected = [float(sum(range(1, size + 1))), float(sum(r * r for r in range(size)))]
    got = _probe(communicator.rank, runtime)
    everyone = communicator.all_gather_object(got, label="sums by XLA")
    for rank, sums in enumerate(everyone):
        if sums != expected:
            return (
                f"XLA's sum over the ranks was {sums} on rank {rank}, where {expected} was expected"
            )
    return ""


def _probe(rank: int, runtime: Runtime) -> Sequence[float] | str:
    import torch

    try:
        (mine,) = runtime.put([torch.tensor([rank + 1.0, float(rank * rank)])], runtime.device(0))
        (total,) = runtime.all_reduce("sum", [mine])
        return [float(value) for value in runtime.fetch([total])[0]]
    except Exception as error:  # XLA's are of many classes
        return f"no value ({str(error).splitlines()[0]})"
