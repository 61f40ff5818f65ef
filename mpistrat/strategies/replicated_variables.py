"""Variables that replicas keep themselves: a copy on each replica, one plain value, or one copy per node."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from mpistrat import arrays
from mpistrat.context import AnyStrategy
from mpistrat.reduce_op import VariableAggregation, VariableSynchronization
from mpistrat.replicas.cross_replica_ops import CrossReplicaOps, from_first_replica
from mpistrat.values import DistributedValues
from mpistrat.variables.aggregating import AggregatingVariable
from mpistrat.variables.node import variable_of_node
from mpistrat.variables.store import VariableStore
from mpistrat.variables.variable import (
    DistributedVariable,
    MirroredVariable,
    PlainVariable,
    SyncOnReadVariable,
    Variable,
)
from mpistrat.variables.variable_arguments import VariableArguments


class CopyPerReplica(VariableStore):
    """Keeps a copy of each variable on each replica.

    Args:
        devices: the devices of this rank's replicas.
        num_copies: number of copies of each variable on this rank; None: one for each device.

    Attributes:
        mirrored: the mirrored variables that the program still has. The keys number all mirrored variables from
            0, in the order of their making.
    """

    mirrored: weakref.WeakValueDictionary[int, MirroredVariable]

    def __init__(
        self,
        strategy: AnyStrategy,
        ops: CrossReplicaOps,
        devices: Sequence[str],
        num_copies: int | None = None,
    ) -> None:
        super().__init__(devices)
        self.communicator = ops.communicator
        self._strategy = strategy
        self._num_copies = num_copies
        self.mirrored = weakref.WeakValueDictionary()
        self._made = 0

    def create(self, asked: VariableArguments) -> Variable:
        with self.communicator.raising_together():
            value = asked.initial_array()
            if asked.aggregation is VariableAggregation.MEAN and not arrays.is_floating(value):
                raise ValueError(
                    f"variable {asked.name!r}: aggregation MEAN needs a floating dtype, got "
                    f"{arrays.dtype_name(value)}"
                )
        name = asked.name
        synchronization = asked.synchronization
        aggregation = asked.aggregation
        label = f"initial value of {name!r} ({synchronization.name}, {aggregation.name})"
        value = from_first_replica(self.communicator, value, label)
        components = []
        for i, device in enumerate(self.devices[: self._num_copies]):
            copy = _on_accelerator(value, device)
            name_of_copy = f"{name}/replica_{i}" if i else name
            components.append(
                PlainVariable(copy, asked.trainable, name_of_copy, synchronization, aggregation)
            )
        if synchronization is VariableSynchronization.ON_READ:
            return SyncOnReadVariable(self._strategy, components)
        variable = MirroredVariable(self._strategy, components)
        self.mirrored[self._made] = variable
        self._made += 1
        return variable

    def copies(self, variable: Any) -> Sequence[Any]:
        if not isinstance(variable, DistributedVariable):
            raise AssertionError(
                f"update needs a variable made in the scope of {self._strategy}, got {variable!r:.60}"
            )
        return variable.values

    def non_slot_devices(self, variables: Sequence[Any]) -> Any:
        return self.devices


class PlainVariables(VariableStore):
    """Keeps the variables of a strategy of one replica: each is a `PlainVariable`, without copies."""

    def __init__(self, strategy: AnyStrategy, device: str) -> None:
        super().__init__((device,))
        self._strategy = strategy

    def create(self, asked: VariableArguments) -> Variable:
        value = _on_accelerator(asked.initial_array(), self.devices[0])
        how = asked.trainable, asked.name, asked.synchronization, asked.aggregation
        variable = PlainVariable(value, *how)
        variable.strategy = self._strategy
        return variable

    def copies(self, variable: Any) -> Sequence[Any]:
        return (variable,)

    def non_slot_devices(self, variables: Sequence[Any]) -> Any:
        return self.devices[0]


class CopyPerNode(VariableStore):
    """Keeps one copy of each variable for all ranks of a node. All these ranks read and update the copy.

    Args:
        device: the device that holds the copy.
        readers: the devices of this rank's replicas. A replica that reads a variable gets the value on its own device.
    """

    on_every_replica = False

    def __init__(
        self, strategy: AnyStrategy, ops: CrossReplicaOps, device: str, readers: Sequence[str]
    ) -> None:
        super().__init__((device,))
        self._strategy = strategy
        self._ops = ops
        self._readers = () if set(readers) == {device} else tuple(readers)

    def create(self, asked: VariableArguments) -> Variable:
        communicator = self._ops.communicator
        with communicator.raising_together():
            value = asked.initial_array()
        value = from_first_replica(communicator, value, f"initial value of {asked.name!r}")
        value = arrays.to_device(value, self.devices[0])
        how = asked.synchronization, asked.aggregation
        component = variable_of_node(communicator, value, asked.trainable, asked.name, *how)
        component.readers = self._readers
        if self._ops.num_replicas == 1:
            component.strategy = self._strategy
            return component
        return AggregatingVariable(self._strategy, [component])

    def copies(self, variable: Any) -> Sequence[Any]:
        if isinstance(variable, DistributedValues):
            return variable.values[:1]
        return (variable,)


def _on_accelerator(value: arrays.Array, device: str) -> arrays.Array:
    """Return `value` on `device`, if that is an accelerator. For a CPU, return `value` itself, wherever it is."""
    if device.startswith("cpu"):
        return value
    return arrays.to_device(value, device)
