"""All work on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpistrat.communicators import LocalCommunicator
from mpistrat.machine.devices import check_device
from mpistrat.strategies.extended import StrategyExtended
from mpistrat.strategy import Strategy
from mpistrat.variables.arguments import VariableArguments
from mpistrat.variables.variable import PlainVariable, Variable


class OneReplicaExtended(StrategyExtended):
    """One replica: values are never wrapped, variables are plain."""

    wraps_values = False
    has_partial_steps = False
    reads_per_replica = False

    def __init__(self, strategy: Strategy, device: str) -> None:
        super().__init__(strategy, LocalCommunicator(), [device])

    def _new_variable(self, asked: VariableArguments) -> Variable:
        variable = PlainVariable(
            asked.initial_array(),
            asked.trainable,
            asked.name,
            asked.synchronization,
            asked.aggregation,
        )
        variable.strategy = self.strategy
        return variable

    def _update(
        self, variable: Any, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        return [fn(variable, *args, **kwargs)]

    def _group(self, results: list[Any], group: bool) -> Any:
        return results[0] if group else tuple(results)

    def non_slot_devices(self, variables: Sequence[Any]) -> Any:
        return self.worker_devices[0]


class OneDeviceStrategy(Strategy):
    """Runs everything on one device, with the same program that runs on many.

    Args:
        device: "cpu", "cpu:0", "cuda:1", …
    """

    def __init__(self, device: str) -> None:
        self._extended = OneReplicaExtended(self, check_device(device))
