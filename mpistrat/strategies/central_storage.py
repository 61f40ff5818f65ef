"""Variables in one place, which all replicas of a node read and update together."""

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
    """Synchronous replicas on one node, and one copy of every variable, which each rank updates a part of.

    Variables and the parameters of torch modules, with their gradients' sum and the state of optimizers that update
    element by element, lie in memory that the ranks share: m bytes of parameters cost m per node, and each rank's own
    gradients. A rank with several replicas computes them on its own copy of torch's parameters. An update of a
    `Variable` is collective, outside `run` with an operand that is equal on all ranks; what was read of it before may
    show the new value afterwards.

    Called by: every rank of the job (or of `comm`), all on one node.
    Args:
        compute_devices: of this rank's replicas; None is its share of all of the node's accelerators, else one CPU.
            Torch modules take ranks of one each.
        parameter_device: where variables, and the parameters of torch modules, live; None is the compute device if
            there is one, else "cpu:0". What a replica reads comes to its own device. A torch module computes where its
            parameters are.
        comm: the mpi4py communicator of the ranks that take part; None is all.
        communication_options, gradients, check, torch_distributed: as of `MirroredStrategy`.
    Raises:
        ValueError: on all ranks, when they are on several nodes.
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
        parameter_device = None if parameter_device is None else check_device(parameter_device)
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
        parameter_device = parameter_device or (devices[0] if shared else "cpu:0")
        asked = dataclasses.replace(asked, shared_parameters=shared)
        group = strategy_parts.agree(
            name, topology, communicator, devices, asked, comm=lambda: resolver.comm
        )
        super().__init__(strategy_parts.central_storage(self, group, parameter_device, asked))
