"""The `extended` of a `TPUStrategy`."""

from __future__ import annotations

from typing import Any

from mpistrat.context import AnyStrategy
from mpistrat.replicas.strategy_extended import Parts, StrategyExtended
from mpistrat.xla.compilations import Compilations
from mpistrat.xla.logical_devices import LogicalDevices


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
