"""Choose the transport (the way of moving bytes) for buffers on GPUs.

All ranks choose from the same facts, so they choose alike.
The choices, best first: a group of the library's own (torch's, CuPy's NCCL), if each rank has its own GPU; an MPI that
was seen to take device memory; pinned host memory. On several nodes, large buffers are combined within each node first
and then between the nodes, if that was measured to be faster.

If values do not go through a library's group, rank 0 says once how they go, why, and how the user can change that.

This file's imports load mpi4py. So it is imported on first use only: `import mpistrat` starts no MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpistrat.communicators.communicator import Communicator
from mpistrat.communicators.node.shared_memory import first_failure
from mpistrat.communicators.router import Router
from mpistrat.communicators.transports.accelerator import nccl
from mpistrat.communicators.transports.accelerator.buffers import DeviceTransport
from mpistrat.communicators.transports.accelerator.device_aware import DeviceAwareTransport
from mpistrat.communicators.transports.accelerator.device_memory_proof import why_not_proven
from mpistrat.communicators.transports.accelerator.hierarchical import (
    HierarchicalDeviceTransport,
    why_not_by_node,
)
from mpistrat.communicators.transports.accelerator.library import (
    CupyLibrary,
    DeviceLibrary,
    TorchLibrary,
)
from mpistrat.communicators.transports.accelerator.library_dispatcher import (
    ForcedTransport,
    LibraryDispatcher,
)
from mpistrat.communicators.transports.accelerator.pending_calls import PendingCalls
from mpistrat.communicators.transports.accelerator.staging import StagedTransport
from mpistrat.liveness.ending.abort_channel import AbortChannel
from mpistrat.liveness.ending.job_end import job_end
from mpistrat.liveness.ending.start_deadline import start_deadline
from mpistrat.liveness.records.watch import CommunicatorWatch
from mpistrat.machine.devices import torch_accelerator
from mpistrat.machine.gpu_advice import tell_of_way
from mpistrat.options import CommunicationImplementation


@dataclass(frozen=True)
class Gpu:
    """The GPU that a rank uses.

    Attributes:
        node: the number of the rank's node.
        name: identifies the GPU on its node, as `devices.seen_accelerators` returns it.
    """

    node: int
    name: str


def use_gpus(
    communicator: Communicator, gpus: Sequence[Gpu], index: int, *, quiet: bool = False
) -> None:
    """Let `communicator` take buffers on GPUs, too. Collective; a second call does nothing.

    The transport for torch's tensors (without torch, CuPy's arrays) is made at once. This may try out NCCL or MPI.

    Called by: `strategies.binding`, if every rank has a GPU; later, as `communicator.use_devices_in`, by
        `pytorch.gradients.overlap` for the communicator of a thread that sends gradients.
    Args:
        gpus: the GPU of each rank, in rank order.
        index: the number of this rank's GPU in this process.
        quiet: True: rank 0 gives no notice if values do not go through a library's group.
    Raises: AssertionError for a communicator of one rank.
    """
    assert isinstance(communicator, Router), "one rank alone moves nothing"
    if not communicator.takes_device_buffers:
        with start_deadline(
            "the choice of a way between GPUs", rank=communicator.rank, size=communicator.size
        ):
            choice = _TransportChoice(communicator, gpus, index, quiet)
            dispatcher = LibraryDispatcher(choice.of_torch, choice.of_cupy)
            dispatcher.of(torch=bool(torch_accelerator()))
            ways = CommunicationImplementation
            forced = {
                way: ForcedTransport(dispatcher, way) for way in (ways.NCCL, ways.HIERARCHICAL)
            }
            communicator.use_devices_in = lambda other: use_gpus(other, gpus, index, quiet=quiet)
            communicator.move_by(dispatcher, forced)


class _TransportChoice:
    """Chooses the transports of one communicator for buffers on GPUs, by the arguments of `use_gpus`. Collective."""

    def __init__(self, communicator: Router, gpus: Sequence[Gpu], index: int, quiet: bool) -> None:
        self._communicator = communicator
        self._gpus = gpus
        self._index = index
        self._tell = tell_of_way
        if quiet or communicator.rank:
            self._tell = lambda *_: None
        self._watch = communicator.contract.watch or CommunicatorWatch()
        self._host = Router(communicator.transports)  # unchecked: only used inside checked calls
        self._channel = AbortChannel(communicator.mpi.comm)
        self._nodes = [gpu.node for gpu in gpus]
        self._not_by_node = why_not_by_node(self._nodes)
        if not self._not_by_node:  # split now: `of_cupy` may run inside a collective
            node = self._nodes[communicator.rank]
            rank = communicator.rank
            self._here = communicator.split(node)
            self._channel_here = AbortChannel(self._here.mpi.comm)
            self._peers = communicator.split(self._nodes[:rank].count(node))

    def of_torch(self) -> DeviceTransport:
        """Make the best transport for torch's tensors. Collective. Called by: `LibraryDispatcher`, once."""
        from mpistrat.communicators.torch_store import Ranks
        from mpistrat.communicators.transports.accelerator.native import NativeTransport
        from mpistrat.communicators.transports.accelerator.torch_groups import version_of

        kind = torch_accelerator()
        library = TorchLibrary(kind, self._index)

        def start(ranks: Router, channel: AbortChannel, why: str) -> tuple[NativeTransport, str]:
            host = Router(ranks.transports)
            comm = ranks.mpi.comm
            watch = job_end().records.watch_of(comm, f"{ranks.contract.name} on devices")
            native = NativeTransport(
                host,
                kind,
                self._index,
                self._watch,
                why,
                channel,
                lambda group: PendingCalls(
                    self._communicator.contract, watch, library, group, listens=host.thread_multiple
                ),
            )
            return native, native.start(Ranks(comm))

        group = "torch's NCCL" if kind == "cuda" else "torch's own group"
        return self._best(library, group, lambda: version_of(kind), start)

    def of_cupy(self) -> DeviceTransport:
        """Make the best transport for CuPy's arrays. Collective. Called by: `LibraryDispatcher`, once."""
        library = CupyLibrary(self._index)

        def start(ranks: Router, channel: AbortChannel, why: str) -> tuple[nccl.NcclTransport, str]:
            host = Router(ranks.transports)
            by_nccl = nccl.NcclTransport(host, self._index, self._watch, why)
            return by_nccl, by_nccl.start(library, channel)

        return self._best(library, "NCCL", lambda: f"NCCL {nccl.version()}", start)

    def _best(
        self,
        library: DeviceLibrary,
        group: str,
        version: Callable[[], str],
        start: Callable[[Router, AbortChannel, str], tuple[DeviceTransport, str]],
    ) -> DeviceTransport:
        """Return the best transport for the arrays of `library`. Collective; all ranks get the same kind.

        Args:
            group: the name of the library's group, for people: "torch's NCCL".
            version: returns this rank's version of the group's library, or raises an error if it is missing.
            start: makes a group of the ranks of a communicator, from the communicator, its abort channel and the
                transport's `why`. Returns: the group's transport, and why it cannot be used; "" if it can.
        Returns: a `HierarchicalDeviceTransport` if the nodes have equally many ranks, and the group works within each
            node; else the group's transport, or a transport through MPI if the group does not work.
        """
        try:
            found = version(), ""
        except Exception as error:  # without CUDA the import may raise several kinds of errors
            found = "", f"{type(error).__name__}: {error}"
        versions = self._host.all_gather_object(found)
        ranks = self._communicator
        through = f"through {versions[0][0]}"
        ungrouped = why_not = shared_gpu(self._gpus) or missing(versions)
        if not why_not:
            flat, why_not = start(ranks, self._channel, through)
        if why_not:
            flat = self._by_mpi(ranks, library, f"; not through {group} ({why_not})")
            self._tell(f"{flat.why.partition(';')[0]}, not through {group}", why_not)
        if len(set(self._nodes)) == 1:
            return flat
        apart = ungrouped or self._not_by_node
        if not apart:
            within, why = start(self._here, self._channel_here, through)
            apart = first_failure(self._host.all_gather_object(why))
            if apart:
                self._tell(f"{through} between all ranks, large ones not by node", apart)
        if apart:
            flat.why += f"; not by node: {apart}"
            return flat
        across = self._by_mpi(self._peers, library)
        by_node = HierarchicalDeviceTransport(
            self._host, self._index, self._watch, self._nodes, within, across, flat
        )
        by_node.measure(library, ranks.mpi.library)
        return by_node

    def _by_mpi(self, ranks: Router, library: DeviceLibrary, text: str = "") -> DeviceTransport:
        """Return a transport between `ranks` through MPI: from device memory if MPI takes it, else through host memory.

        Called by: all ranks of the communicator, together; `ranks` may differ between them.
        Args:
            ranks: the communicator, or the communicator of the ranks with this rank's number on their nodes.
            text: added to the transport's `why`, after the words for the way through MPI.
        """
        name = "torch" if isinstance(library, TorchLibrary) else "cupy"
        node = self._nodes[self._host.rank]
        unproven = why_not_proven(self._host, node, name, self._index)
        args = Router(ranks.transports), self._index, self._watch
        if not unproven:
            why = f"through MPI, which was seen to take device memory{text}"
            return DeviceAwareTransport(*args, why)
        why = f"in chunks through pinned host memory{text}; not by MPI from device memory ({unproven})"
        return StagedTransport(*args, why)


def shared_gpu(gpus: Sequence[Gpu]) -> str:
    """Return "ranks 0 and 2 share a GPU", a reason not to use NCCL, for the first such pair; "" if no ranks share."""
    for rank, gpu in enumerate(gpus):
        first = gpus.index(gpu)
        if first < rank:
            return f"ranks {first} and {rank} share a GPU"
    return ""


def missing(versions: Sequence[tuple[str, str]]) -> str:
    """Return why the ranks cannot use a library together; "" if they can.

    The reason names the lowest rank that has no library, or another version than rank 0.

    Args: versions: for each rank, (version, "") if it has the library, else ("", why it has none).
    """
    for rank, (version, why) in enumerate(versions):
        if why:
            return f"rank {rank} has none: {why}"
        if version != versions[0][0]:
            return f"rank 0 has {versions[0][0]}, rank {rank} {version}"
    return ""
