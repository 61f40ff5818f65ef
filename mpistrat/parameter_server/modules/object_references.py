"""What is sent by name between the chief and its workers: each of them has it, or has its own form of it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from mpistrat.context import AnyStrategy
from mpistrat.parameter_server.client.variables_on_servers import (
    RemoteVariable,
    parts_of,
    variable_of,
)
from mpistrat.parameter_server.coordinator.pickling import References

if TYPE_CHECKING:
    from mpistrat.parameter_server.job.job import ServerJob

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
        of_torch = self._of_torch
        if of_torch is not None and (key := of_torch.reference_of(value)) is not None:
            return _OF_TORCH, key
        parts = parts_of(value)
        if not isinstance(parts[0], RemoteVariable) or value.strategy is not self._strategy:
            return None
        how = value.trainable, value.synchronization, value.aggregation
        return _VARIABLE, value.name, tuple(part.address for part in parts), how

    def reduction_of(self, value: Any) -> tuple[Any, ...] | None:
        of_torch = self._of_torch
        return None if of_torch is None else of_torch.reduction_of(value)

    @property
    def _of_torch(self) -> References | None:
        return self._strategy.extended.torch_references() if "torch" in sys.modules else None

    def resolve(self, key: Any) -> Any:
        if key[0] == _STRATEGY:
            return self._strategy
        if key[0] == _OF_TORCH:
            return self._strategy.extended.torch_references().resolve(key[1])
        if key not in self._made:
            _, name, addresses, how = key
            self._made[key] = variable_of(self._strategy, self._job, name, addresses, how)
        return self._made[key]
