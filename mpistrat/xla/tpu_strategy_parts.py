"""Puts together the parts of a `TPUStrategy`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from mpistrat import arrays, nest, xla
from mpistrat.context import AnyStrategy
from mpistrat.indexed_slices import IndexedSlices
from mpistrat.replicas.cross_replica_ops import CrossReplicaOps
from mpistrat.replicas.gradient_rule import GradientRule
from mpistrat.replicas.group import ReplicaGroup
from mpistrat.replicas.strategy_extended import Parts, StrategyExtended
from mpistrat.replicas.torch_modules import ModuleParts
from mpistrat.strategies import strategy_parts
from mpistrat.strategies.replicated_variables import CopyPerReplica
from mpistrat.strategies.strategy_arguments import StrategyArguments
from mpistrat.values import DistributedValues
from mpistrat.variables.variable import Variable
from mpistrat.variables.variable_arguments import VariableArguments
from mpistrat.xla.compilations import Compilations
from mpistrat.xla.lazy_all_reduce import LazyAllReduce
from mpistrat.xla.logical_devices import LogicalDevices
from mpistrat.xla.recorded_steps import RecordedSteps
from mpistrat.xla.replica_cores import ReplicaCores
from mpistrat.xla.replicas import RecordedReplicas, ReplicasOnCores, components_on
from mpistrat.xla.system import TpuSystem


class StartedOps(CrossReplicaOps):
    """`CrossReplicaOps` that starts the computation of each collective's result on the device before the call ends.

    All ranks are in the call then. So a rank that reads the result later starts no graph alone, and the other ranks
    need not read theirs. No other tensor is computed. Inside a step (a call of `run`'s function) nothing starts.
    """

    def reduce(self, *args: Any) -> list[Any]:
        return _started(super().reduce(*args))

    def gather(self, value: Any, *args: Any) -> Any:
        # A gather goes through the host. Reading a value that is not started would compute all recorded operations.
        return _started(super().gather(_started(value), *args))

    def reduce_to(self, *args: Any) -> Any:
        return _started(super().reduce_to(*args))

    def batch_reduce(self, *args: Any) -> list[Any]:
        return _started(super().batch_reduce(*args))

    def aggregate(self, *args: Any) -> Any:
        return _started(super().aggregate(*args))


def _started(result: Any) -> Any:
    parts: list[Any] = []
    for leaf in nest.flatten(result):
        if isinstance(leaf, IndexedSlices):
            parts += (leaf.values, leaf.indices)
        elif isinstance(leaf, DistributedValues):
            parts += leaf.values
        else:
            parts.append(leaf)
    on_devices = [part for part in parts if arrays.is_on_xla(part)]
    xla.start().graphs.start(on_devices)
    return result


class XlaExtended(StrategyExtended):
    """`StrategyExtended` for replicas on XLA devices.

    Attributes:
        compilations: counts the graphs that XLA compiled for this rank's steps.
        logical_devices: lays tensors out over the devices of the rank's replica.
    """

    experimental_require_static_shapes = True

    def __init__(
        self,
        strategy: AnyStrategy,
        parts: Parts,
        compilations: Compilations,
        logical_devices: LogicalDevices,
    ) -> None:
        super().__init__(strategy, parts)
        self.compilations = compilations
        self.logical_devices = logical_devices

    def check_destination(self, destinations: Any) -> None:
        """Accept every destination, because each rank reduces to its own devices."""


class VariablesOnDevice(CopyPerReplica):
    """Makes each variable of a `TPUStrategy` a torch tensor on the rank's device, even from a NumPy array or number."""

    def create(self, asked: VariableArguments) -> Variable:
        with self.communicator.raising_together():
            value = asked.initial_array()
            if not arrays.is_cupy(value):
                value = arrays.to_device(arrays.as_tensor(value), self.devices[0])
        return super().create(asked._replace(initial_value=value, dtype=None))


def on_xla(
    strategy: Any,
    group: ReplicaGroup,
    asked: StrategyArguments,
    system: TpuSystem,
    cores_per_replica: int,
) -> XlaExtended:
    """Make the parts of a `TPUStrategy` for this rank, and return its `extended`. Called by: `TPUStrategy`, every rank.

    A rank with one replica records steps for the replica's core or cores. A rank with several replicas records one
    program for all of its cores. The ranks find out together whether XLA sums over them or host memory must.
    Args:
        strategy: the new `TPUStrategy`.
        asked: the options that the program gave to the strategy.
        system: the XLA devices of all ranks.
        cores_per_replica: number of logical devices (cores) of each replica.
    """
    communicator = group.communicator
    runtime = system.runtime
    why_through_the_host = ""
    if communicator.size > 1 and not communicator.takes_device_buffers:
        from mpistrat.xla.transport import use_xla  # needs MPI, and a single rank may lack it

        why_through_the_host = use_xla(communicator, runtime)
    plan = strategy_parts.input_plan(group, ranks_are_workers=True)
    replicas: RecordedReplicas
    if group.num_local_replicas > 1:
        cores = ReplicaCores(runtime, system.cores_of_ranks, communicator.rank)
        take_apart = functools.partial(components_on, cores)
        ops = StartedOps(group, options=asked.options, take_apart=take_apart)
        steps = RecordedSteps(runtime, group, cores.step)
        replicas = ReplicasOnCores(strategy, group, ops, cores, steps, why_through_the_host)
        # `run` copies batches to all cores at once, so the input pipeline copies none.
        plan = dataclasses.replace(plan, devices=())
    else:
        ops = StartedOps(group, options=asked.options)
        steps = RecordedSteps(runtime, group, runtime.graphs.step)
        replicas = RecordedReplicas(strategy, group, ops, steps, why_through_the_host)
    sums = LazyAllReduce(communicator, replicas.sum_of_rank)
    modules = strategy_parts.mirrored_modules(
        ModuleParts(replicas, GradientRule(asked.gradients), sums)
    )
    variables = VariablesOnDevice(strategy, ops, group.worker_devices, num_copies=1)
    parts = Parts(modules, variables, plan)
    logical_devices = LogicalDevices(runtime, cores_per_replica)
    return XlaExtended(strategy, parts, steps.compilations, logical_devices)
