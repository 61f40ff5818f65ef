"""A strategy that keeps one copy of each variable for all replicas of a node."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpistrat.cluster_resolver import MPIClusterResolver
from mpistrat.communicators.of_resolver import communicator_of
from mpistrat.machine.devices import check_device, check_devices
from mpistrat.options import CommunicationOptions
from mpistrat.strategies import strategy_parts
from mpistrat.strategies.binding import bind_all
from mpistrat.strategies.strategy_arguments import StrategyArguments
from mpistrat.strategy import Strategy

if TYPE_CHECKING:
    from mpi4py import MPI


class CentralStorageStrategy(Strategy):
    """Synchronous replicas on one node, with one copy of every variable. Each rank updates a part of the copy.

    The ranks share the memory of variables, of torch modules' parameters and of the sums of their gradients. They also
    share the state of optimizers that update element by element. So m bytes of parameters take m bytes per node, and
    each rank has its own gradients beside them. A rank with several devices has its own copy of the parameters of torch
    modules.

    An update of a `Variable` is collective. Outside `run`, the operand of the update must be equal on all ranks. An
    array that was read from a variable before an update may show the new value afterwards.

    Called by: every rank of the job (or of `comm`), all on one node.
    Args:
        compute_devices: the devices of this rank's replicas. None: its share of all accelerators of the node, else one
            CPU. Ranks share the parameters of torch modules only if each rank has one device.
        parameter_device: the device of variables and of torch modules' parameters. None: the compute device if there is
            only one, else "cpu:0". A replica that reads a variable gets the value on the replica's device. A torch
            module computes on the device of its parameters.
        comm: the mpi4py communicator of the ranks that take part; None: all ranks.
        communication_options: defaults of every collective, without a wire format.
        gradients: whether `backward()` leaves the "sum" or the "mean" of the replicas' gradients in `.grad`.
        check: "always" lets the ranks agree on each collective before its bytes move. With "never", ranks that call
            different collectives get wrong results or an error of MPI, or wait until the stall is reported.
        torch_distributed: whether torch's default group is over the strategy's ranks.
    Raises:
        ValueError: on all ranks, if they are on several nodes, or if the options have a wire format.

    Example:
        >>> strategy = ms.CentralStorageStrategy(["cpu:0"])
        >>> with strategy.scope():
        ...     v = ms.Variable(1.0)
        ...     _ = v.assign_add(2.0)
        >>> v.numpy()
        array(3., dtype=float32)
    """

    def __init__(
        self,
        compute_devices: Sequence[str] | None = None,
        parameter_device: str | None = None,
        *,
        comm: MPI.Intracomm | None = None,
        communication_options: CommunicationOptions | None = None,
        gradients: str | None = None,
        check: str = "always",
        torch_distributed: bool = False,
    ) -> None:
        asked = StrategyArguments(communication_options, gradients, check, torch_distributed)
        if asked.has_wire_format:
            raise ValueError(
                "CentralStorageStrategy is for one node, where nothing is sent: leave out wire_dtype and wire_format"
            )
        checked = check_devices(compute_devices)
        if parameter_device is not None:
            parameter_device = check_device(parameter_device)
        resolver = MPIClusterResolver(comm)
        topology = resolver.topology()
        if topology.num_nodes > 1:
            raise ValueError(
                f"CentralStorageStrategy keeps variables in the memory of one node, and the ranks are on "
                f"{topology.num_nodes} nodes: use MultiWorkerMirroredStrategy (with shared_parameters=True each node "
                "keeps one copy of the parameters)"
            )
        name = type(self).__name__
        communicator = communicator_of(resolver, check, name)
        devices = checked or bind_all(communicator, topology)
        shared = len(devices) == 1
        if not parameter_device:
            parameter_device = devices[0] if shared else "cpu:0"
        asked = dataclasses.replace(asked, shared_parameters=shared)
        group = strategy_parts.agree(
            name, topology, communicator, devices, asked, comm=lambda: resolver.comm
        )
        super().__init__(strategy_parts.central_storage(self, group, parameter_device, asked))
