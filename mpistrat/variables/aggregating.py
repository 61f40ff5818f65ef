"""A variable with one copy that several replicas share."""

from __future__ import annotations

from typing import Any

from mpistrat import arrays
from mpistrat.context import AnyStrategy, get_replica_context, per_thread
from mpistrat.reduce_op import VariableAggregation
from mpistrat.variables.variable import DistributedVariable


class AggregatingVariable(DistributedVariable):
    """A variable with one copy for all replicas of a rank, such as a variable on the host of GPUs or on a server.

    An update inside `run` combines the operands of all replicas, as `aggregation` says, and changes the copy once. An
    update inside `extended.update` changes the copy by its operand as it is.

    Raises: ValueError for an update inside `run` with aggregation NONE.
    """

    def read_value(self) -> Any:
        self._here()
        return self._values[0].read_value()

    def sparse_read(self, indices: Any) -> Any:
        self._here()
        return self._values[0].sparse_read(indices)

    def _update_inside_run(self, replica: int, method: str, operand: Any) -> Any:
        if per_thread.updated_replica is not None:
            return self._values[0]._update(method, operand)
        if self.aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"variable {self.name!r} has one copy for all replicas: to update it inside run, give it "
                "an aggregation (SUM, MEAN or ONLY_FIRST_REPLICA)"
            )
        updated = get_replica_context().merge_call(self._merge_update, (method, operand))
        readers = getattr(self._values[0], "readers", ())  # a variable on a server has none
        if readers:
            return arrays.to_device(updated, readers[replica])
        return updated

    def _merge_update(self, strategy: AnyStrategy, method: str, operand: Any) -> Any:
        return self._values[0]._update(method, self._aggregated(operand, f"{method} to"))
