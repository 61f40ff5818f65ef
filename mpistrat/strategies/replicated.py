"""The `StrategyExtended` of strategies whose replicas keep variables themselves."""

from __future__ import annotations

from typing import Any

from mpistrat.replicas.strategy_extended import StrategyExtended


class ReplicatedExtended(StrategyExtended):
    """The `extended` of a strategy that keeps no variables on parameter servers: all ranks take part in each step."""

    def check_destination(self, destinations: Any) -> None:
        """Accept every destination: each rank puts the result on its own devices. Raises nothing."""
