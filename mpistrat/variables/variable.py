"""Variables: arrays that strategies keep on their replicas, and how updates and reads combine copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpistrat import arrays
from mpistrat.arrays import Array
from mpistrat.context import (
    AnyStrategy,
    current_local_replica,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_replica_block,
    per_thread,
)
from mpistrat.indexed_slices import IndexedSlices
from mpistrat.reduce_op import VariableAggregation, VariableSynchronization
from mpistrat.values import ActsAsArray, DistributedValues, PassedWhole
from mpistrat.variables.updates import fitting, updated

_REDUCING = (VariableAggregation.SUM, VariableAggregation.MEAN)
_IRREDUCIBLE_SCATTERS = ("scatter_min", "scatter_max", "scatter_update")


class _CreatedByStrategy(type):
    """`Variable(...)` makes what the strategy in force makes of it."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is Variable:
            return get_strategy().extended.create_variable(*args, **kwargs)
        return super().__call__(*args, **kwargs)


class Variable(ActsAsArray, metaclass=_CreatedByStrategy):
    """An array with state, kept by the strategy in whose scope it is made.

    Called by: every rank, in the same order, inside `strategy.scope()` (or outside any, for an
    ordinary variable). The first rank's initial value is everybody's.

    Args:
        initial_value: an array, a number, a list of numbers, or a function that returns one; it is
            called once.
        trainable: defaults to True, and to False for ON_READ variables.
        name: for error messages and checkpoints.
        dtype: converts the initial value.
        synchronization: ON_WRITE (AUTO means it): copies change together. ON_READ: each replica changes
            its own copy, and reading outside `run` combines them.
        aggregation: how what the replicas assign (ON_WRITE), or their copies (ON_READ), are combined.
        shape: what the initial value must have. With it and `dtype`, a strategy that splits variables calls a
            function for each part, with its `partition_shape` and the `partition_offset` of its first element, or with
            both as a `shard_info` that has `shape` and `offset`.
    Raises:
        ValueError: `synchronization` is NONE, MEAN is asked of a dtype that is not floating, or the shape is another.
    """

    name: str
    trainable: bool
    synchronization: VariableSynchronization
    aggregation: VariableAggregation

    def __init__(
        self,
        initial_value: Any,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: Any = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = VariableAggregation.NONE,
        shape: Sequence[int] | None = None,
    ) -> None:
        raise TypeError(f"{type(self).__name__} is made by a strategy; call mpistrat.Variable")

    def read_value(self) -> Array:
        """The value here: this replica's copy inside `run`, the combined one outside. Do not write to it."""
        raise NotImplementedError

    def _update(self, method: str, operand: Any) -> Any:
        raise NotImplementedError

    def state(self) -> Array:
        """The one array that a checkpoint keeps. Called by every rank for ON_READ variables."""
        raise NotImplementedError

    def load_state(self, state: Any) -> None:
        """Restore what `state` returned, on every copy. Called by every rank."""
        self._update("assign", state)

    @property
    def shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    @property
    def dtype(self) -> Any:
        raise NotImplementedError

    def value(self) -> Array:
        """Same as `read_value`."""
        return self.read_value()

    def numpy(self) -> Any:
        """`read_value` as a NumPy array."""
        return arrays.to_numpy(self.read_value())

    def _read(self) -> Array:
        return self.read_value()

    def sparse_read(self, indices: Any) -> Array:
        """The rows at `indices`, integers of shape [n]."""
        return self.read_value()[indices]

    def assign(self, value: Any) -> Any:
        """Set the value; inside `run`, combined over the replicas as `aggregation` says.

        Returns:
            the value after the update, as `read_value` gives it here.
        """
        return self._update("assign", value)

    def assign_add(self, delta: Any) -> Any:
        """Add `delta`; else like `assign`."""
        return self._update("assign_add", delta)

    def assign_sub(self, delta: Any) -> Any:
        """Subtract `delta`; else like `assign`."""
        return self._update("assign_sub", delta)

    def scatter_add(self, slices: IndexedSlices) -> Any:
        """Add rows; an index may occur more than once."""
        return self._update("scatter_add", slices)

    def scatter_sub(self, slices: IndexedSlices) -> Any:
        """Subtract rows; an index may occur more than once."""
        return self._update("scatter_sub", slices)

    def scatter_mul(self, slices: IndexedSlices) -> Any:
        """Multiply rows."""
        return self._update("scatter_mul", slices)

    def scatter_div(self, slices: IndexedSlices) -> Any:
        """Divide rows."""
        return self._update("scatter_div", slices)

    def scatter_min(self, slices: IndexedSlices) -> Any:
        """Lower rows to the minimum of both."""
        return self._update("scatter_min", slices)

    def scatter_max(self, slices: IndexedSlices) -> Any:
        """Raise rows to the maximum of both."""
        return self._update("scatter_max", slices)

    def scatter_update(self, slices: IndexedSlices) -> Any:
        """Replace rows."""
        return self._update("scatter_update", slices)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} shape={tuple(self.shape)} dtype={self.dtype}>"


class PlainVariable(Variable):
    """One array: a variable of a single replica, or one component of a distributed one.

    Attributes:
        readers: the devices of this rank's replicas, if it is kept on another than they compute on.
    """

    readers: Sequence[str] = ()

    def __init__(
        self,
        value: Array,
        trainable: bool,
        name: str,
        synchronization: VariableSynchronization = VariableSynchronization.ON_WRITE,
        aggregation: VariableAggregation = VariableAggregation.NONE,
    ) -> None:
        self._array = self._kept(value)
        self.trainable = trainable
        self.name = name
        self.synchronization = synchronization
        self.aggregation = aggregation
        self._container: DistributedVariable | None = None
        self.strategy: AnyStrategy | None = None  # None for a component, whose container has it

    def _kept(self, value: Array) -> Array:
        """The array to begin with."""
        return arrays.copy(value)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._array.shape)

    @property
    def dtype(self) -> Any:
        return self._array.dtype

    def read_value(self) -> Array:
        if self.readers and per_thread.updated_replica is None:
            replica = current_local_replica()
            if replica is not None:
                return arrays.to_device(self._array, self.readers[replica])
        return self._array

    def state(self) -> Array:
        return arrays.copy(self._array)

    def _update(self, method: str, operand: Any) -> Array:
        # Updates make a new array: an array that was read before keeps its values.
        self._array = updated(method, self._array, operand, self.name)
        return self.read_value()


class DistributedVariable(PassedWhole, DistributedValues, Variable):
    """A variable with a copy on each replica of this rank.

    Attributes:
        values: the copies, `PlainVariable`s in replica order.
    """

    def __init__(self, strategy: AnyStrategy, components: list[PlainVariable]) -> None:
        super().__init__(components)
        for component in components:
            component._container = self
        self.strategy = strategy
        self.name = components[0].name
        self.trainable = components[0].trainable
        self.synchronization = components[0].synchronization
        self.aggregation = components[0].aggregation

    @property
    def shape(self) -> tuple[int, ...]:
        return self._values[0].shape

    @property
    def dtype(self) -> Any:
        return self._values[0].dtype

    def _here(self) -> int | None:
        """The local replica that this thread is; None outside `run`. RuntimeError in another strategy."""
        check_strategy(self)
        return current_local_replica()

    def _own_copy_update(self, replica: int, method: str, operand: Any) -> Array:
        if isinstance(operand, DistributedValues):
            operand = operand.values[replica]
        return self._values[replica]._update(method, operand)

    def state(self) -> Array:
        return self._values[0].state()

    def load_state(self, state: Any) -> None:
        self._update_all("assign", state)

    def _update(self, method: str, operand: Any) -> Any:
        replica = self._here()
        if method in _IRREDUCIBLE_SCATTERS and self.aggregation in _REDUCING:
            raise NotImplementedError(
                f"variable {self.name!r}: {method} cannot be combined over replicas by "
                f"{self.aggregation.name}; use aggregation NONE or ONLY_FIRST_REPLICA"
            )
        if replica is None:
            self._update_all(method, operand)
            return self.read_value()
        return self._update_inside_run(replica, method, operand)

    def _update_inside_run(self, replica: int, method: str, operand: Any) -> Any:
        raise NotImplementedError

    def _aggregated(self, values: Any, what: str) -> Any:
        """The replicas' `values`, combined."""
        ops = self.strategy.extended.cross_replica_ops
        return ops.aggregate(self.aggregation, values, f"{what} {self.name!r}")

    def _update_all(self, method: str, operand: Any) -> None:
        if isinstance(operand, Variable):
            operand = operand.read_value()
        elif isinstance(operand, DistributedValues):
            raise ValueError(
                f"variable {self.name!r}: {method} outside run takes one value for all replicas, "
                f"got a {type(operand).__name__}, with which the copies would differ; reduce it first"
            )
        for component in self._values:
            component._update(method, operand)

    _read, __repr__ = Variable._read, Variable.__repr__


class MirroredVariable(DistributedVariable):
    """An ON_WRITE variable: updates are combined first, so that all copies stay equal.

    With `VariableAggregation.NONE`, an update inside `run` changes the replica's own copy only.
    """

    def read_value(self) -> Array:
        return self._values[self._here() or 0].read_value()

    def _update_inside_run(self, replica: int, method: str, operand: Any) -> Any:
        if per_thread.updated_replica is not None or self.aggregation is VariableAggregation.NONE:
            return self._own_copy_update(replica, method, operand)
        return get_replica_context().merge_call(self._merge_update, (method, operand))

    def _merge_update(self, strategy: AnyStrategy, method: str, operand: Any) -> Any:
        combined = self._aggregated(operand, f"{method} to")
        return DistributedValues([copy._update(method, combined) for copy in self._values])


class SyncOnReadVariable(DistributedVariable):
    """An ON_READ variable: each replica changes its own copy; reading outside `run` combines them.

    Inside `Strategy.replica()` the program's loop changes its replica's copy; reading combines all copies.
    """

    def read_value(self) -> Array:
        """Inside `run` this replica's copy; else all copies of all ranks combined: a collective.

        Raises:
            ValueError: outside `run` with `VariableAggregation.NONE`.
        """
        replica = self._here()
        if replica is not None and not in_replica_block(self.strategy):
            return self._values[replica].read_value()
        if self.aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"variable {self.name!r} is ON_READ with aggregation NONE: its copies have no single "
                "value. Read it inside run, or give it an aggregation"
            )
        copies = DistributedValues([component.read_value() for component in self._values])
        return self._aggregated(copies, "read of")

    def state(self) -> Array:
        return arrays.copy(self.read_value())

    def load_state(self, state: Any) -> None:
        if self.aggregation is VariableAggregation.SUM:
            # The copies must add up to the state; integers are cut off, as in tf.distribute.
            share = fitting(self._values[0].read_value(), state, self.name)
            state = arrays.cast_like(share / self.strategy.num_replicas_in_sync, share)
        self._update_all("assign", state)

    def _update(self, method: str, operand: Any) -> Any:
        replica = self._here()
        if method.startswith("scatter_"):
            raise NotImplementedError(
                f"variable {self.name!r} is ON_READ, which has no {method}; use assign or assign_add"
            )
        if replica is not None:
            return self._own_copy_update(replica, method, operand)
        if method == "assign":
            self.load_state(operand)
        elif self.aggregation is VariableAggregation.SUM:
            raise ValueError(
                f"variable {self.name!r} is ON_READ with aggregation SUM: {method} outside run would "
                "add once per replica; use assign, or update inside run"
            )
        else:
            self._update_all(method, operand)
        return None if self.aggregation is VariableAggregation.NONE else self.read_value()


def check_strategy(variable: Any) -> None:
    """RuntimeError in another strategy than the variable's."""
    if has_strategy() and get_strategy() is not variable.strategy:
        raise RuntimeError(
            f"variable {variable.name!r} belongs to {variable.strategy} and was used while "
            f"{get_strategy()} is in force; strategies must not be mixed"
        )
