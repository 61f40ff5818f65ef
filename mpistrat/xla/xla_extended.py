"""What a TPUStrategy has beside what `Strategy` shows."""

from __future__ import annotations

from typing import Any

from mpistrat.context import AnyStrategy
from mpistrat.replicas.strategy_extended import Parts, StrategyExtended
from mpistrat.xla.compilations import Compilations
from mpistrat.xla.logical_devices import LogicalDevices


class XlaExtended(StrategyExtended):
    """The replicas of a rank on XLA devices.

    Attributes:
        compilations: of this rank.
        logical_devices: of a replica.
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
        self.compilations, self.logical_devices = compilations, logical_devices

    def check_destination(self, destinations: Any) -> None:
        """Each rank reduces to its own devices: all will do."""
