"""A copy of every variable on each replica of a node's ranks, or of one rank."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpistrat.cluster_resolver import MPIClusterResolver
from mpistrat.communicators import Communicator
from mpistrat.communicators.of_resolver import communicator_of
from mpistrat.cross_device_ops import CrossDeviceOps
from mpistrat.liveness.ending.start_deadline import start_deadline
from mpistrat.machine.devices import check_devices
from mpistrat.options import CommunicationOptions
from mpistrat.strategies import strategy_parts
from mpistrat.strategies.strategy_arguments import StrategyArguments
from mpistrat.strategy import Strategy

if TYPE_CHECKING:
    from mpi4py import MPI


@functools.cache
def _of_node(communicator: Communicator, node: int) -> Communicator:
    """The ranks of a node; split off once, for MPI has few communicators to give."""
    return communicator.split(node)


@functools.cache
@start_deadline("the division of all ranks into nodes")
def _comm_of_node(node: int) -> MPI.Intracomm:
    """As `_of_node`, mpi4py's, of all ranks."""
    world = MPIClusterResolver().comm
    return world.Split(node, world.rank)


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
        torch_distributed: as of `MultiWorkerMirroredStrategy`, over the ranks of this node.
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
        torch_distributed: bool = False,
    ) -> None:
        asked = StrategyArguments(
            communication_options,
            gradients,
            check,
            torch_distributed,
            deterministic,
            shared_parameters,
            cross_device_ops,
        )
        if cross_device_ops is not None:
            between_ranks = CommunicationOptions(implementation=cross_device_ops.between_ranks)
            asked = dataclasses.replace(asked, options=between_ranks.merge(communication_options))
        checked = check_devices(devices)
        resolver = MPIClusterResolver(comm)
        topology = resolver.topology()
        communicator = communicator_of(resolver, check, type(self).__name__)
        is_part = comm is None and topology.num_nodes > 1
        if is_part:
            communicator = _of_node(communicator, topology.node)
        group = strategy_parts.agree(
            type(self).__name__,
            topology,
            communicator,
            checked,
            asked,
            comm=lambda: _comm_of_node(topology.node) if is_part else resolver.comm,
        )
        super().__init__(strategy_parts.mirrored(self, group, asked))
