"""A copy of every variable on each replica of a node's ranks, or of one rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mpistrat.cluster_resolver import ClusterResolver, MPIClusterResolver
from mpistrat.communicators import Communicator, LocalCommunicator
from mpistrat.cross_device_ops import CrossDeviceOps
from mpistrat.errors import CollectiveMismatchError
from mpistrat.machine.devices import check_devices
from mpistrat.options import CommunicationOptions, implementation_of
from mpistrat.strategies.binding import bind
from mpistrat.strategies.extended import StrategyExtended
from mpistrat.strategies.threads import share_cores
from mpistrat.strategies.tracing import trace_ranges
from mpistrat.strategy import Strategy
from mpistrat.topology import Topology
from mpistrat.wire_formats import name_of

if TYPE_CHECKING:
    from mpi4py import MPI

GRADIENTS = ("sum", "mean")
CHECKS = ("always", "never")


def check_strategy_arguments(
    options: CommunicationOptions | None,
    gradients: str | None,
    cross_device_ops: CrossDeviceOps | None = None,
    check: str = "always",
    deterministic: bool = False,
) -> None:
    """ValueError for arguments of the wrong kind."""
    if not isinstance(deterministic, bool):
        raise ValueError(f"deterministic must be True or False, got {deterministic!r:.60}")
    if not (isinstance(check, str) and check in CHECKS):
        raise ValueError(f"check must be one of {CHECKS}, got {check!r:.60}")
    if options is not None and not isinstance(options, CommunicationOptions):
        raise ValueError(f"communication_options must be CommunicationOptions, got {options!r:.60}")
    if gradients is not None and not (isinstance(gradients, str) and gradients in GRADIENTS):
        raise ValueError(
            "gradients must be 'sum' (scale the loss with compute_average_loss) or 'mean' (as DDP), or "
            f"None; got {gradients!r:.60}"
        )
    if cross_device_ops is not None and not isinstance(cross_device_ops, CrossDeviceOps):
        raise ValueError(f"cross_device_ops must be a CrossDeviceOps, got {cross_device_ops!r:.60}")
    if deterministic and cross_device_ops is not None:
        raise ValueError(
            "deterministic=True fixes the order in which replicas are added up; with a cross_device_ops of your own "
            "that order is yours: give one of them"
        )
    if deterministic and options is not None and (options.wire_dtype or options.wire_format):
        raise ValueError(
            "deterministic=True keeps every bit of a sum, which wire_dtype and wire_format leave out: give one of them"
        )


@functools.cache
def _of_node(communicator: Communicator, node: int) -> Communicator:
    """The ranks of a node; split off once, for MPI has few communicators to give."""
    return communicator.split(node)


class MirroredStrategy(Strategy):
    """Synchronous replicas on one node: the ranks that share this rank's memory.

    Called by: every rank of the node (or of `comm`).
    Args:
        devices: this rank's devices, one replica each, e.g. ["cpu:0", "cpu:1"]; None or [] is one
            replica on the rank's own device. Torch modules take the first device for all replicas.
        cross_device_ops: how values, and gradients in `backward()`, are reduced among this rank's replicas.
        comm: the mpi4py communicator of the ranks that take part; None is those of this node.
        communication_options: defaults of every collective.
        gradients: whether `backward()` leaves the "sum" (scale the loss with `compute_average_loss`) or
            the "mean" (as DDP) of the replicas' gradients in `.grad`.
        check: "always" has the ranks agree on each collective before its bytes move; with "never", ranks that
            call different ones get wrong results, an error of MPI's, or wait until the stall is reported.
        shared_parameters: the ranks keep one copy of the parameters of torch modules on the CPU, as
            `MultiWorkerMirroredStrategy` does. Takes one replica per rank.
        deterministic: sums over replicas have the same bits however many ranks the replicas are spread over, and
            each rank computes with OMP_NUM_THREADS threads, or with 1. Not with `cross_device_ops`.
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        comm: MPI.Intracomm | None = None,
        communication_options: CommunicationOptions | None = None,
        gradients: str | None = None,
        check: str = "always",
        deterministic: bool = False,
        shared_parameters: bool = False,
    ) -> None:
        check_strategy_arguments(
            communication_options, gradients, cross_device_ops, check, deterministic
        )
        checked = check_devices(devices) if devices else None
        resolver = MPIClusterResolver(comm)
        topology = resolver.topology()
        communicator = communicator_of(resolver, check, type(self).__name__)
        if comm is None and topology.num_nodes > 1:
            communicator = _of_node(communicator, topology.node)
        setup(
            self,
            topology,
            communicator,
            checked,
            cross_device_ops,
            communication_options,
            gradients,
            deterministic,
            shared_parameters=shared_parameters,
        )


def communicator_of(resolver: ClusterResolver, check: str, what: str) -> Communicator:
    """Our communicator, for a strategy of class `what`, over the ranks that an `MPIClusterResolver` speaks of."""
    comm = getattr(resolver, "comm", None)
    if comm is None:
        return LocalCommunicator()
    from mpistrat.communicators.construction import communicator_for

    return communicator_for(comm, check, f"constructor of {what}")


def setup(
    strategy: Any,
    topology: Topology,
    communicator: Communicator,
    devices: Sequence[str] | None,
    cross_device_ops: CrossDeviceOps | None,
    options: CommunicationOptions | None,
    gradients: str | None,
    deterministic: bool,
    extended: Callable[..., StrategyExtended] = StrategyExtended,
    shared_parameters: bool = False,
) -> None:
    """Agree with the other ranks, share out the cores and the GPUs, and give `strategy` its parts.

    Raises:
        CollectiveMismatchError: on all ranks, when they make different strategies.
        ValueError: parameters are to be shared by several replicas of a rank, or with a wire format.
    """
    if not isinstance(shared_parameters, bool):
        raise ValueError(f"shared_parameters must be True or False, got {shared_parameters!r:.60}")
    replicas = 1 if devices is None else len(devices)
    if shared_parameters and replicas > 1:
        raise ValueError(
            f"shared_parameters=True takes one replica per rank, got {replicas} devices; the replicas of one rank "
            "share their parameters anyway"
        )
    if shared_parameters and deterministic:
        raise ValueError(
            "shared_parameters=True adds up in the order of the ranks, deterministic=True in that of a tree; leave "
            "one of them out"
        )
    if shared_parameters and options is not None and (options.wire_dtype or options.wire_format):
        raise ValueError(
            "shared_parameters=True sends sums between nodes as they are; leave out wire_dtype and wire_format"
        )
    what = type(strategy).__name__
    sharing = ", shared_parameters=True" if shared_parameters else ""
    wire = "" if options is None or options.wire_format is None else name_of(options.wire_format)
    communicator.barrier(
        label=f"constructor of {what}, gradients={gradients!r}{sharing}, {options} {wire}".rstrip()
    )
    threads = share_cores(communicator, topology, deterministic)
    trace_ranges(communicator)
    replicas_of_ranks = tuple(communicator.all_gather_object(replicas, label="replicas"))
    if len(set(replicas_of_ranks)) > 1 and not deterministic:
        told = ", ".join(f"rank {r} with {k} replicas" for r, k in enumerate(replicas_of_ranks))
        raise CollectiveMismatchError(
            f"the ranks made a {what} with different numbers of devices: {told}. With deterministic=True they may "
            "differ"
        )
    devices = bind(communicator, topology, devices)
    communicator = communicator.by(implementation_of(options))
    strategy._gradients = gradients
    strategy._shared_parameters = shared_parameters
    strategy._extended = extended(
        strategy, communicator, devices, cross_device_ops, options, threads, replicas_of_ranks
    )
