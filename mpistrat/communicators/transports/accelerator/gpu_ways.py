"""Which way buffers on GPUs go. All ranks choose by the same facts, so they choose alike.

NCCL, where each rank has a GPU of its own; else an MPI that is proven to take device memory; else pinned host memory.

mpi4py is imported below this file, and this file on first use: `import mpistrat` starts no MPI.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpistrat.communicators.communicator import Communicator
from mpistrat.communicators.router import Router
from mpistrat.communicators.transports.accelerator import nccl
from mpistrat.communicators.transports.accelerator.device_aware import DeviceAwareTransport
from mpistrat.communicators.transports.accelerator.device_memory_proof import why_not_proven
from mpistrat.communicators.transports.accelerator.library import CupyLibrary, TorchLibrary
from mpistrat.communicators.transports.accelerator.staging import StagedTransport
from mpistrat.communicators.transports.transport import Transport
from mpistrat.liveness.abort_channel import AbortChannel
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
            communicator.move_by(_best_way(communicator, gpus, index))


def _best_way(communicator: Router, gpus: Sequence[Gpu], index: int) -> Transport:
    watch = communicator.contract.watch or CommunicatorWatch()
    host = Router(communicator.ways)  # inside calls that are checked
    of_torch = torch_accelerator()
    library = TorchLibrary(of_torch, index) if of_torch else CupyLibrary(index)
    why_not = shared_gpu(gpus) or missing_nccl(host.all_gather_object(_nccl_version()))
    if not why_not:
        by_nccl = nccl.NcclTransport(
            host, index, watch, "through NCCL", AbortChannel(communicator.mpi.comm)
        )
        why_not = by_nccl.start(library)
        if not why_not:
            return by_nccl
    kind = "torch" if of_torch else "cupy"
    unproven = why_not_proven(host, gpus[host.rank].node, kind, index)
    if not unproven:
        why = f"through MPI, which was seen to take device memory, and not through NCCL ({why_not})"
        return DeviceAwareTransport(host, index, watch, why, communicator.mpi.comm)
    why = (
        f"in chunks through pinned host memory: not through NCCL ({why_not}), and not by MPI from device memory "
        f"({unproven})"
    )
    return StagedTransport(host, index, watch, why)


def shared_gpu(gpus: Sequence[Gpu]) -> str:
    """Why NCCL, which refuses a GPU that several ranks use, cannot be used; "" if none is."""
    for rank, gpu in enumerate(gpus):
        first = gpus.index(gpu)
        if first < rank:
            return f"ranks {first} and {rank} share a GPU"
    return ""


def missing_nccl(versions: Sequence[int | str]) -> str:
    """Why the ranks cannot use NCCL together; "" if they can.

    Args:
        versions: each rank's, or why it has none.
    """
    for rank, version in enumerate(versions):
        if isinstance(version, str):
            return f"rank {rank} has none: {version}"
        if version != versions[0]:
            return f"rank 0 has version {versions[0]}, rank {rank} {version}"
    return ""


def _nccl_version() -> int | str:
    try:
        return nccl.version()
    except Exception as error:  # of CuPy's import: there is more than one way to have no CUDA
        return f"{type(error).__name__}: {error}"
