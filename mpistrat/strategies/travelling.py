"""What travels by name between the chief and its workers: each has it, or has its own form of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpistrat.parameter_server.served_shards import ServedShards
from mpistrat.parameter_server.served_variable import ServedVariable
from mpistrat.strategies.central_storage import AggregatingVariable
from mpistrat.strategies.served import variable_of

if TYPE_CHECKING:
    from mpistrat.parameter_server.job import ServerJob
    from mpistrat.strategy import Strategy

_STRATEGY = "strategy"


class Travelling:
    """The strategy, and its variables. A key has all that is needed to make the other side's form."""

    def __init__(self, strategy: Strategy, job: ServerJob) -> None:
        self._strategy, self._job = strategy, job
        self._made: dict[Any, Any] = {}

    def reference_of(self, value: Any) -> Any | None:
        """The key of `value`; None for what is copied."""
        if value is self._strategy:
            return (_STRATEGY,)
        if getattr(value, "strategy", None) is not self._strategy:
            return None
        if isinstance(value, ServedVariable):
            how = value.trainable, value.synchronization, value.aggregation
            return "variable", value.name, (value.address,), how
        if isinstance(value, AggregatingVariable):
            return self.reference_of(value.values[0])
        if isinstance(value, ServedShards):
            how = value.trainable, value.synchronization, value.aggregation
            return "variable", value.name, tuple(one.address for one in value.variables), how
        return None

    def resolve(self, key: Any) -> Any:
        if key[0] == _STRATEGY:
            return self._strategy
        if key not in self._made:
            _, name, addresses, how = key
            self._made[key] = variable_of(self._strategy, self._job, name, addresses, how)
        return self._made[key]
