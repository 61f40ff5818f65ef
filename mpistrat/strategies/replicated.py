"""What strategies have whose replicas keep variables themselves."""

from __future__ import annotations

from typing import Any

from mpistrat.context import AnyStrategy
from mpistrat.replicas.strategy_extended import Parts, StrategyExtended


class ReplicatedExtended(StrategyExtended):
    """All ranks take part in everything.

    Args:
        between_graph: whether each rank runs a program of its own.
        wraps_values: whether the components of values are wrapped.
    """

    def __init__(
        self,
        strategy: AnyStrategy,
        parts: Parts,
        *,
        between_graph: bool = False,
        wraps_values: bool = True,
    ) -> None:
        super().__init__(strategy, parts)
        self._between_graph = between_graph
        self.wraps_values = wraps_values

    @property
    def experimental_between_graph(self) -> bool:
        return self._between_graph

    def check_destination(self, destinations: Any) -> None:
        """Each rank reduces to its own devices: all will do."""
