"""Variables in one place, replicas that compute on several devices of one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpistrat.communicators import LocalCommunicator
from mpistrat.context import get_replica_context, per_thread
from mpistrat.devices import check_device, check_devices
from mpistrat.reduce_op import VariableAggregation, VariableSynchronization
from mpistrat.strategy import Strategy
from mpistrat.strategy_extended import StrategyExtended, initial_array
from mpistrat.values import DistributedValues
from mpistrat.variables import (
    DistributedVariable,
    PlainVariable,
    Variable,
    check_scatter,
)


class AggregatingVariable(DistributedVariable):
    """One copy; what the replicas assign inside `run` is combined and applied once."""

    def read_value(self) -> Any:
        self._here()
        return self._values[0].read_value()

    def state(self) -> Any:
        return self._values[0].state()

    def load_state(self, state: Any) -> None:
        self._update_all("assign", state)

    def _update(self, method: str, operand: Any) -> Any:
        replica = self._here()
        check_scatter(self, method)
        if replica is None:
            self._update_all(method, operand)
            return self.read_value()
        if per_thread.updated_replica is not None:
            return self._values[0]._update(method, operand)
        if self.aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"variable {self.name!r} has one copy for all replicas: to update it inside run, give it "
                "an aggregation (SUM, MEAN or ONLY_FIRST_REPLICA)"
            )
        context = get_replica_context()
        assert context is not None
        return context.merge_call(self._merge_update, (method, operand))

    def _merge_update(self, strategy: Strategy, method: str, operand: Any) -> Any:
        combined = strategy.extended.cross_replica_ops.aggregate(
            self.aggregation, operand, f"{method} to {self.name!r}"
        )
        return self._values[0]._update(method, combined)


class _CentralStorageExtended(StrategyExtended):
    has_partial_steps = False
    experimental_between_graph = True

    def __init__(
        self, strategy: Strategy, compute_devices: Sequence[str], parameter_device: str
    ) -> None:
        super().__init__(strategy, LocalCommunicator(), compute_devices)
        self._parameter_device = parameter_device

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        return (self._parameter_device,)

    def non_slot_devices(self, variables: Sequence[Any]) -> Any:
        return min(variables, key=lambda variable: variable.name)

    def _new_variable(
        self,
        initial_value: Any,
        trainable: bool,
        name: str,
        dtype: Any,
        synchronization: VariableSynchronization,
        aggregation: VariableAggregation,
    ) -> Variable:
        value = initial_array(initial_value, dtype)
        component = PlainVariable(value, trainable, name, synchronization, aggregation)
        if self.num_local_replicas == 1:
            component.strategy = self.strategy
            return component
        return AggregatingVariable(self.strategy, [component], synchronization, aggregation)

    def _update(
        self, variable: Any, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        components = variable.values if isinstance(variable, DistributedValues) else (variable,)
        return self._on_each_component(components[:1], fn, args, kwargs)

    def _batch_destinations(self, pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        return list(pairs)


class CentralStorageStrategy(Strategy):
    """One copy of every variable, read by the replicas of this rank and updated once per step.

    Args:
        compute_devices: the devices of the replicas; None is one CPU.
        parameter_device: where variables live; None is the compute device if there is one, else "cpu:0".
    """

    def __init__(
        self, compute_devices: Sequence[str] | None = None, parameter_device: str | None = None
    ) -> None:
        devices = check_devices(compute_devices or ["cpu:0"])
        if parameter_device is None:
            parameter_device = devices[0] if len(devices) == 1 else "cpu:0"
        self._extended = _CentralStorageExtended(self, devices, check_device(parameter_device))
