"""The two kinds of state of an object: a common state, equal on all ranks and saved once, and a state of each rank.

An object with `state_dict` and `load_state_dict` has a common state. An object with `rank_state_dict` and
`load_rank_state_dicts(states)` has a state of each rank. `states` maps each rank that saved to its state; a look-up may
read the state's file. If an object has both states, the common state is loaded first. The rank state of an object with
`stays_with_rank = True` is local: `run_elastic` sends no copy of it to other ranks. An object with
`either_state_suffices = True` is restored from a checkpoint with one of its two states, too.

An object may also have `state_schema(state)` and `rank_state_schema(state)`. They return a schema (types and ranges of
the values) for `schema.check`. If a saved state does not fit, the checkpoint is damaged, and nothing of it is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpistrat import arrays
from mpistrat.checkpoint.replica_states import StatesOfReplicas, local_replicas, schema_of_replicas
from mpistrat.checkpoint.schema import Schema
from mpistrat.reduce_op import VariableAggregation
from mpistrat.variables.variable import SyncOnReadVariable, Variable


class _OfVariable:
    """Wraps a variable for a checkpoint: its value, equal on all ranks, is the common state. Made by: `stateful`."""

    either_state_suffices = False

    def __init__(self, variable: Variable) -> None:
        self._variable = variable

    def state_dict(self) -> dict[str, Any]:
        return {"value": self._variable.state()}

    def state_schema(self, state: Mapping[str, Any]) -> Schema:
        return {"value": check_array} if state else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "value" in state:
            self._variable.load_state(state["value"])
        elif not self.either_state_suffices:
            raise ValueError(
                f"variable {self._variable.name!r} has one value for all replicas, and was saved ON_READ with "
                "aggregation NONE, as a value of each replica. Make it ON_READ again, or leave it out of the checkpoint"
            )


class _OfCopies(_OfVariable):
    """Wraps an ON_READ variable for a checkpoint. Each rank's state has the copies of its replicas.

    The common state has the combined value; with aggregation NONE it is empty. A variable that was saved as a mirrored
    one has the common state alone.
    """

    either_state_suffices = True
    _variable: SyncOnReadVariable

    def state_dict(self) -> dict[str, Any]:
        has_no_value = self._variable.aggregation is VariableAggregation.NONE
        return {} if has_no_value else super().state_dict()

    def rank_state_dict(self) -> dict[str, Any]:
        copies = [component.state() for component in self._variable.values]
        replicas = local_replicas(self._variable.strategy.extended)
        return {**replicas, "aggregation": self._variable.aggregation.name, "copies": copies}

    def rank_state_schema(self, state: Mapping[str, Any]) -> Schema:
        return schema_of_replicas(state, "copies", check_array)

    def load_rank_state_dicts(self, states: Mapping[int, Any]) -> None:
        """Give each replica its saved copy, if the job has as many replicas as the job that saved.

        Any other replica keeps the value that `load_state_dict` has derived from the combined value. So do all replicas
        if the variable had another aggregation, because its copies would combine to another value.

        Raises: ValueError if the variable was saved with aggregation NONE, and the number of replicas differs or a
            replica has no saved copy.
        """
        variable = self._variable
        extended = self._variable.strategy.extended
        now = extended.num_replicas_in_sync
        saved = StatesOfReplicas(states, extended.communicator.rank)
        own = variable.aggregation.name
        aggregation = saved.some.get("aggregation", own)  # earlier versions did not save it
        fits = saved.total == now and aggregation in (own, "NONE")
        for replica, component in enumerate(variable.values, extended.first_replica_id):
            state = saved.of(replica) if fits else None
            if state is not None:
                component.load_state(state["copies"][replica - state["first_replica"]])
            elif aggregation == "NONE":
                why = (
                    f"this job has {now} replicas" if saved.total != now else f"{replica}'s is lost"
                )
                raise ValueError(
                    f"variable {variable.name!r} was saved ON_READ with aggregation NONE: each of {saved.total} "
                    f"replicas saved its own copy, and {why}. Start as many replicas, or leave it out of the checkpoint"
                )


def check_array(value: Any) -> None:
    if not arrays.is_array(value):
        raise TypeError(f"it is a {type(value).__name__}, and no array")


def stateful(name: str, value: Any) -> Any:
    """Return `value` itself if it has the methods of a common or rank state; for a variable, a wrapper with them.

    Args:
        name: name of the object in the checkpoint, for the message.
    Raises: TypeError for an object without a state.
    """
    if isinstance(value, SyncOnReadVariable):
        return _OfCopies(value)
    if isinstance(value, Variable):
        return _OfVariable(value)
    if isinstance(value, type) or not (has_common_state(value) or has_state_of_rank(value)):
        raise TypeError(
            f"Checkpoint({name}=…) takes an object with state_dict() and load_state_dict(), or a mpistrat.Variable; "
            f"got {value!r:.60}"
        )
    return value


def has_common_state(value: Any) -> bool:
    return _has(value, "state_dict", "load_state_dict")


def has_state_of_rank(value: Any) -> bool:
    return _has(value, "rank_state_dict", "load_rank_state_dicts")


def _has(value: Any, saves: str, loads: str) -> bool:
    return callable(getattr(value, saves, None)) and callable(getattr(value, loads, None))
