"""States that ranks saved of their replicas, found by the ids of these: ranks may have different numbers of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mpistrat.checkpoint.schema import COUNT, Schema, check

if TYPE_CHECKING:
    from mpistrat.replicas.strategy_extended import StrategyExtended


def local_replicas(extended: StrategyExtended) -> dict[str, int]:
    """What a rank's state says of its replicas, so that `StatesOfReplicas` finds them: part of the state."""
    return {
        "first_replica": extended.first_replica_id,
        "replicas": extended.num_local_replicas,
        "total": extended.num_replicas_in_sync,
    }


def schema_of_replicas(state: Mapping[str, Any], name: str, of_each: Schema) -> dict[str, Schema]:
    """That of a rank's `state` with `local_replicas` and, under `name`, one entry for each of its replicas."""
    first, count = state.get("first_replica"), state.get("replicas")
    least = first + count if type(first) is int and type(count) is int else 1

    def check_entries(entries: Any) -> None:
        check(entries, [of_each], name)
        if len(entries) != count:
            raise ValueError(f"there are {len(entries)} for {count} replicas")

    replicas = range(1, 1 << 31)
    return {
        "first_replica": COUNT,
        "replicas": replicas,
        "total": range(least, replicas.stop),
        name: check_entries,
    }


def state_of_some_rank(states: Mapping[int, Any], rank: int) -> Any:
    """For what all ranks' states tell alike: that of `rank`, which it reads anyway, if there is one."""
    return states[rank if rank in states else min(states)]


class StatesOfReplicas:
    """
    Args:
        states: by the ranks that saved; they are read when they are asked for.
        rank: which asks.

    Attributes:
        some: the state of some rank.
        total: how many replicas there were.
    """

    def __init__(self, states: Mapping[int, Mapping[str, Any]], rank: int) -> None:
        self._states = states
        self.some = state_of_some_rank(states, rank)
        self.total: int = self.some["total"]

    def of(self, replica: int) -> Any:
        """The state of the rank that had `replica`, or None."""
        if replica >= self.total:
            return None
        likely = replica // self.some["replicas"]
        for rank in sorted(self._states, key=likely.__ne__):  # the likely one first
            saved = self._states[rank]
            if 0 <= replica - saved["first_replica"] < saved["replicas"]:
                return saved
        return None
