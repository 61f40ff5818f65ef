"""Which way buffers on GPUs go. All ranks choose by the same facts, so they choose alike.

A group of the library's own (torch's, CuPy's NCCL), where each rank has a GPU of its own; else an MPI that is proven to
take device memory; else pinned host memory.

mpi4py is imported below this file, and this file on first use: `import mpistrat` starts no MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpistrat.communicators.communicator import Communicator
from mpistrat.communicators.router import Router
from mpistrat.communicators.transports.accelerator import nccl
from mpistrat.communicators.transports.accelerator.buffers import DeviceTransport
from mpistrat.communicators.transports.accelerator.by_library import ByLibrary
from mpistrat.communicators.transports.accelerator.calls_under_way import CallsUnderWay
from mpistrat.communicators.transports.accelerator.device_aware import DeviceAwareTransport
from mpistrat.communicators.transports.accelerator.device_memory_proof import why_not_proven
from mpistrat.communicators.transports.accelerator.library import CupyLibrary, TorchLibrary
from mpistrat.communicators.transports.accelerator.staging import StagedTransport
from mpistrat.liveness.abort_channel import AbortChannel
from mpistrat.liveness.job_end import job_end
from mpistrat.liveness.start_deadline import start_deadline
from mpistrat.liveness.watch import CommunicatorWatch
from mpistrat.machine.devices import torch_accelerator


@dataclass(frozen=True)
class Gpu:
    """The GPU that a rank uses. `name` identifies it on node number `node`, as in `devices.seen_accelerators`."""

    node: int
    name: str


def use_gpus(communicator: Communicator, gpus: Sequence[Gpu], index: int) -> None:
    """From now on `communicator` takes buffers on GPUs, too. Collective; a second call does nothing.

    Args:
        gpus: each rank's, in rank order.
        index: the number of this rank's in this process.
    """
    assert isinstance(communicator, Router), "one rank alone moves nothing"
    if not communicator.takes_device_buffers:
        with start_deadline(
            "the choice of a way between GPUs", rank=communicator.rank, size=communicator.size
        ):
            ways = _Choice(communicator, gpus, index)
            by_library = ByLibrary(ways.of_torch, ways.of_cupy)
            by_library.of(torch=bool(torch_accelerator()))
            communicator.move_by(by_library)


class _Choice:
    """Of the ways of a communicator between GPUs; the arguments are those of `use_gpus`."""

    def __init__(self, communicator: Router, gpus: Sequence[Gpu], index: int) -> None:
        self._communicator, self._gpus, self._index = communicator, gpus, index
        self._watch = communicator.contract.watch or CommunicatorWatch()
        self._host = Router(communicator.ways)  # inside calls that are checked
        self._channel = AbortChannel(communicator.mpi.comm)

    def of_torch(self) -> DeviceTransport:
        """The best way of tensors. Collective."""
        from mpistrat.communicators.torch_store import Ranks
        from mpistrat.communicators.transports.accelerator.native import NativeTransport
        from mpistrat.communicators.transports.accelerator.torch_groups import version_of

        kind = torch_accelerator()
        everyone = self._host.all_gather_object(_version(lambda: version_of(kind)))
        why_not = shared_gpu(self._gpus) or missing(everyone)
        if not why_not:
            contract, host = self._communicator.contract, self._host
            library, comm = TorchLibrary(kind, self._index), self._communicator.mpi.comm
            watch = job_end().records.watch_of(comm, f"{contract.name} on devices")
            native = NativeTransport(
                *(host, kind, self._index, self._watch, f"through {everyone[0][0]}", self._channel),
                lambda joint: CallsUnderWay(
                    contract, watch, library, joint, listens=host.thread_multiple
                ),
            )
            why_not = native.start(Ranks(comm))
            if not why_not:
                return native
        return self._by_mpi("torch", f"not through a group of torch's ({why_not})")

    def of_cupy(self) -> DeviceTransport:
        """The best way of CuPy's arrays. Collective."""
        everyone = self._host.all_gather_object(_version(lambda: f"version {nccl.version()}"))
        why_not = shared_gpu(self._gpus) or missing(everyone)
        if not why_not:
            by_nccl = nccl.NcclTransport(
                self._host, self._index, self._watch, "through NCCL", self._channel
            )
            why_not = by_nccl.start(CupyLibrary(self._index))
            if not why_not:
                return by_nccl
        return self._by_mpi("cupy", f"not through NCCL ({why_not})")

    def _by_mpi(self, library: str, why_not: str) -> DeviceTransport:
        node = self._gpus[self._host.rank].node
        unproven = why_not_proven(self._host, node, library, self._index)
        if not unproven:
            why = f"through MPI, which was seen to take device memory, and {why_not}"
            comm = self._communicator.mpi.comm
            return DeviceAwareTransport(self._host, self._index, self._watch, why, comm)
        why = (
            f"in chunks through pinned host memory: {why_not}, and not by MPI from device memory "
            f"({unproven})"
        )
        return StagedTransport(self._host, self._index, self._watch, why)


def shared_gpu(gpus: Sequence[Gpu]) -> str:
    """Why NCCL, which refuses a GPU that several ranks use, cannot be used; "" if none is."""
    for rank, gpu in enumerate(gpus):
        first = gpus.index(gpu)
        if first < rank:
            return f"ranks {first} and {rank} share a GPU"
    return ""


def missing(versions: Sequence[tuple[str, str]]) -> str:
    """Why the ranks cannot use a library together; "" if they can.

    Args:
        versions: each rank's, and why it has none, "" if it has one.
    """
    for rank, (version, why) in enumerate(versions):
        if why:
            return f"rank {rank} has none: {why}"
        if version != versions[0][0]:
            return f"rank 0 has {versions[0][0]}, rank {rank} {version}"
    return ""


def _version(find: Callable[[], str]) -> tuple[str, str]:
    try:
        return find(), ""
    except Exception as error:  # of an import: there is more than one way to have no CUDA
        return "", f"{type(error).__name__}: {error}"
