"""The `StrategyExtended` of strategies whose replicas keep variables themselves."""

from __future__ import annotations

from typing import Any

from mpistrat.replicas.strategy_extended import StrategyExtended


class ReplicatedExtended(StrategyExtended):
    """The methods of strategies in which all ranks take part in everything."""

    def check_destination(self, destinations: Any) -> None:
        """Accept every destination: each rank puts the result on its own devices. Raises nothing."""
