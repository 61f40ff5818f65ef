"""Finds the saved states of replicas. Each rank that saved may have had another number of replicas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpistrat.checkpoint.schema import COUNT, Schema, check
from mpistrat.replicas.strategy_extended import StrategyExtended


def local_replicas(extended: StrategyExtended) -> dict[str, int]:
    """Return the id of this rank's first replica, its number of replicas, and the number of all replicas.

    A rank's state includes them, so that `StatesOfReplicas` finds its replicas.
    """
    return {
        "first_replica": extended.first_replica_id,
        "replicas": extended.num_local_replicas,
        "total": extended.num_replicas_in_sync,
    }


def schema_of_replicas(state: Mapping[str, Any], name: str, of_each: Schema) -> dict[str, Schema]:
    """Return the schema of a rank's `state`: `local_replicas` and, under `name`, a list with an entry for each replica.

    Args:
        of_each: schema of an entry of that list.
    """
    first: Any = state.get("first_replica")
    count: Any = state.get("replicas")
    least = first + count if {type(first), type(count)} == {int} else 1

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
    """Return the saved state of `rank`; if `rank` has saved none, the state of the lowest rank that has.

    Callers need only entries that are equal on all ranks. The state of `rank` costs nothing, because it is read anyway.
    """
    if rank in states:
        return states[rank]
    return states[min(states)]


class StatesOfReplicas:
    """Finds the state of the rank that had a replica, among the states of all ranks that saved.

    Args:
        states: states by the ranks that saved; a state may be read from its file at the look-up.
        rank: this rank, now.
    Attributes:
        some: the state of `rank`, or of the lowest rank if `rank` has saved none.
        total: number of replicas that were saved.
    """

    def __init__(self, states: Mapping[int, Mapping[str, Any]], rank: int) -> None:
        self._states = states
        self.some = state_of_some_rank(states, rank)
        self.total: int = self.some["total"]

    def of(self, replica: int) -> Any:
        """Return the state of the rank that had the replica with this id; None if there is none."""
        if replica >= self.total:
            return None
        likely = replica // self.some["replicas"]
        for rank in sorted(self._states, key=likely.__ne__):  # the likely rank first
            saved = self._states[rank]
            if 0 <= replica - saved["first_replica"] < saved["replicas"]:
                return saved
        return None
