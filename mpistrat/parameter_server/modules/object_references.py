"""What travels by name between the chief and its workers: each has it, or has its own form of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpistrat.context import AnyStrategy
from mpistrat.parameter_server.remote_shards import RemoteShards
from mpistrat.parameter_server.remote_variable import RemoteVariable
from mpistrat.parameter_server.variables import variable_of
from mpistrat.variables.aggregating import AggregatingVariable

if TYPE_CHECKING:
    from mpistrat.parameter_server.job import ServerJob
    from mpistrat.parameter_server.modules.worker_modules import ReferencedModules

_STRATEGY, _VARIABLE, _OF_TORCH = "strategy", "variable", "of torch"


class ObjectReferences:
    """The strategy, its variables, and what torch modules have on servers.

    A key has all that is needed to make the other side's form.
    """

    def __init__(self, strategy: AnyStrategy, job: ServerJob) -> None:
        self._strategy, self._job = strategy, job
        self._made: dict[Any, Any] = {}

    def reference_of(self, value: Any) -> Any | None:
        """The key of `value`; None for what is copied."""
        if value is self._strategy:
            return (_STRATEGY,)
        if self._modules is not None:
            key = self._modules.reference_of(value)
            if key is not None:
                return _OF_TORCH, key
        of_servers = isinstance(value, (RemoteVariable, RemoteShards, AggregatingVariable))
        if not of_servers or value.strategy is not self._strategy:
            return None
        if isinstance(value, RemoteVariable):
            how = value.trainable, value.synchronization, value.aggregation
            return _VARIABLE, value.name, (value.address,), how
        if isinstance(value, AggregatingVariable):
            return self.reference_of(value.values[0])
        if isinstance(value, RemoteShards):
            how = value.trainable, value.synchronization, value.aggregation
            return _VARIABLE, value.name, tuple(one.address for one in value.variables), how
        return None

    def reduction_of(self, value: Any) -> tuple[Any, ...] | None:
        return None if self._modules is None else self._modules.reduction_of(value)

    @property
    def _modules(self) -> ReferencedModules | None:
        return self._strategy.extended.modules.made

    def resolve(self, key: Any) -> Any:
        if key[0] == _STRATEGY:
            return self._strategy
        if key[0] == _OF_TORCH:
            return self._strategy.extended.modules.get().resolve(key[1])
        if key not in self._made:
            _, name, addresses, how = key
            self._made[key] = variable_of(self._strategy, self._job, name, addresses, how)
        return self._made[key]
