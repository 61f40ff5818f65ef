"""A strategy with a copy of every variable on each replica of one node's ranks, or of one rank."""

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
    """Return a communicator of the ranks of `node`, this rank's node. Called by: every rank of `communicator`.

    The result is cached, because MPI can make only few communicators.
    """
    return communicator.split(node)


@functools.cache
@start_deadline("the division of all ranks into nodes")
def _comm_of_node(node: int) -> MPI.Intracomm:
    """Return an mpi4py communicator of the ranks of `node`, this rank's node. Called by: every rank of the job.

    The result is cached, because MPI can make only few communicators.
    """
    world = MPIClusterResolver().comm
    return world.Split(node, world.rank)


class MirroredStrategy(Strategy):
    """Trains synchronous replicas on the ranks of one node, the ranks that can share memory with this rank.

    Called by: every rank of the node (or of `comm`).
    Args:
        devices: this rank's devices, one replica each, e.g. ["cpu:0", "cpu:1"]. None or []: one replica on the rank's
            own device: an accelerator of the node, or else the CPU. Torch modules take the first device for all
            replicas.
        cross_device_ops: reduces values, and gradients in `backward()`, among this rank's replicas.
        comm: the mpi4py communicator of the ranks that take part; None: the ranks of this node.
        communication_options: defaults of every collective.
        gradients: whether `backward()` leaves the "sum" (scale the loss with `compute_average_loss`) or the "mean"
            (like DDP) of the replicas' gradients in `.grad`. None: the first loss decides.
        check: "always" lets the ranks agree on each collective before its bytes move. With "never", ranks that call
            different collectives get wrong results or an error of MPI, or wait until the stall is reported.
        shared_parameters: whether the ranks keep one copy, on the CPU, of the parameters of torch modules, of the
            gradients and of the optimizer's state. Each rank then updates a slice of the parameters, if the optimizer
            updates element by element. Needs one replica per rank.
        deterministic: whether sums over replicas have the same bits on any number of ranks. Each rank then computes
            with OMP_NUM_THREADS threads, or with 1. Not with `cross_device_ops`.
        torch_distributed: whether torch's default group is over the ranks of this node: the program's group, or else a
            group of the backend "mpistrat" that the strategy makes.
    Raises:
        ValueError: an argument is wrong, or two arguments exclude each other.

    Example:
        >>> strategy = ms.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> def value_fn(context):
        ...     return context.replica_id_in_sync_group
        >>> ids = strategy.experimental_distribute_values_from_function(value_fn)
        >>> strategy.experimental_local_results(ids)
        (0, 1)
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
