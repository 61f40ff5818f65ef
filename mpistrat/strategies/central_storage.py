"""Variables in one place, which all replicas of a node read and update together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mpistrat.cluster_resolver import MPIClusterResolver
from mpistrat.machine.devices import check_device, check_devices
from mpistrat.options import CommunicationOptions
from mpistrat.strategies.extended import StrategyExtended
from mpistrat.strategies.mirrored import check_strategy_arguments, communicator_of, setup
from mpistrat.strategy import Strategy
from mpistrat.values import DistributedValues
from mpistrat.variables.aggregating import AggregatingVariable
from mpistrat.variables.arguments import VariableArguments
from mpistrat.variables.node import variable_of_node
from mpistrat.variables.variable import Variable

if TYPE_CHECKING:
    from mpi4py import MPI


class CentralStorageExtended(StrategyExtended):
    """One copy of every variable, for all replicas of a node."""

    has_partial_steps = False
    experimental_between_graph = True
    parameter_device = "cpu:0"

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        return (self.parameter_device,)

    def non_slot_devices(self, variables: Sequence[Any]) -> Any:
        return min(variables, key=lambda variable: variable.name)

    def _new_variable(self, asked: VariableArguments) -> Variable:
        with self.communicator.raising_together():
            value = asked.initial_array()
        value = self.cross_replica_ops.from_first_replica(value, f"initial value of {asked.name!r}")
        how = asked.synchronization, asked.aggregation
        component = variable_of_node(self.communicator, value, asked.trainable, asked.name, *how)
        if self.num_replicas_in_sync == 1:
            component.strategy = self.strategy
            return component
        return AggregatingVariable(self.strategy, [component], *how)

    def _update(
        self, variable: Any, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        components = variable.values if isinstance(variable, DistributedValues) else (variable,)
        return self._on_each_component(components[:1], fn, args, kwargs)

    def _batch_destinations(self, pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        return list(pairs)


class CentralStorageStrategy(Strategy):
    """Synchronous replicas on one node, and one copy of every variable, which each rank updates a part of.

    Variables and the parameters of torch modules, with their gradients' sum and the state of optimizers that update
    element by element, lie in memory that the ranks share: m bytes of parameters cost m per node, and each rank's own
    gradients. A rank with several replicas computes them on its own copy of torch's parameters. An update of a
    `Variable` is collective, outside `run` with an operand that is equal on all ranks; what was read of it before may
    show the new value afterwards.

    Called by: every rank of the job (or of `comm`), all on one node.
    Args:
        compute_devices: of this rank's replicas; None is one CPU.
        parameter_device: where variables live; None is the compute device if there is one, else "cpu:0".
        comm: the mpi4py communicator of the ranks that take part; None is all.
        communication_options, gradients, check: as of `MirroredStrategy`.
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
    ) -> None:
        check_strategy_arguments(communication_options, gradients, check=check)
        wire = communication_options
        if wire is not None and (wire.wire_dtype or wire.wire_format):
            raise ValueError(
                "CentralStorageStrategy is for one node, where nothing is sent: leave out wire_dtype and wire_format"
            )
        devices = check_devices(compute_devices or ["cpu:0"])
        if parameter_device is None:
            parameter_device = devices[0] if len(devices) == 1 else "cpu:0"
        parameter_device = check_device(parameter_device)
        resolver = MPIClusterResolver(comm)
        topology = resolver.topology()
        if topology.num_nodes > 1:
            raise ValueError(
                f"CentralStorageStrategy keeps variables in the memory of one node, and the ranks are on "
                f"{topology.num_nodes} nodes: use MultiWorkerMirroredStrategy (with shared_parameters=True each node "
                "keeps one copy of the parameters)"
            )
        setup(
            self,
            topology,
            communicator_of(resolver, check, type(self).__name__),
            devices,
            None,
            communication_options,
            gradients,
            deterministic=False,
            extended=CentralStorageExtended,
            shared_parameters=len(devices) == 1,
        )
        assert isinstance(self._extended, CentralStorageExtended)
        self._extended.parameter_device = parameter_device
