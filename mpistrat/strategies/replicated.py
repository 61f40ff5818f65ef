"""What strategies have whose replicas keep variables themselves."""

from __future__ import annotations

from typing import Any

from mpistrat.replicas.strategy_extended import StrategyExtended


class ReplicatedExtended(StrategyExtended):
    """All ranks take part in everything."""

    def check_destination(self, destinations: Any) -> None:
        """Each rank reduces to its own devices: all will do."""
