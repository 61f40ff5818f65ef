"""Variables: arrays that strategies keep on their replicas. Updates and reads combine the copies."""

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
from mpistrat.values import (
    BINARY_OPERATORS,
    BIT_OPERATORS,
    ActsAsArray,
    DistributedValues,
    PassedWhole,
)
from mpistrat.variables.updates import updated

# These operators do not read an ON_READ variable outside replicas, where a read is a collective: Python may compare
# values on a rank alone, as in `variable in values`. Other operators, such as +, read it, as in TensorFlow.
_LOCAL_OPERATORS = ("eq", "ne", "invert", "divmod", "round", "format", *BIT_OPERATORS)
_REDUCING = (VariableAggregation.SUM, VariableAggregation.MEAN)
_IRREDUCIBLE_SCATTERS = ("scatter_min", "scatter_max", "scatter_update")


class _CreatedByStrategy(type):
    """The metaclass of `Variable`: a call `Variable(...)` returns a variable that the strategy in force makes."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is Variable:
            return get_strategy().extended.create_variable(*args, **kwargs)
        return super().__call__(*args, **kwargs)


class Variable(ActsAsArray, metaclass=_CreatedByStrategy):
    """An array that its methods can change. The strategy of the scope keeps the copies, usually one for each replica.

    Called by: every rank, in the same order, inside `strategy.scope()`; or outside any scope, for an ordinary variable.
        All ranks begin with the first rank's initial value.
    Args:
        initial_value: an array, a number, a list of numbers, or a function that returns one of these; it is called
            once.
        trainable: whether optimizers update it. None is True, or False for ON_READ variables.
        name: name for error messages and checkpoints.
        dtype: dtype to convert the initial value to; None keeps the dtype of an array.
        synchronization: ON_WRITE (AUTO means it): all copies change together. ON_READ: each replica changes its own
            copy, and reading outside `run` combines the copies.
        aggregation: how the replicas' operands of an update (ON_WRITE), or their copies (ON_READ), are combined.
        shape: shape that the initial value must have. With `shape` and `dtype`, a strategy that splits variables calls
            an initial function for each part, with `partition_shape` and `partition_offset` (index of the part's first
            element), or with a `shard_info` that has both as `shape` and `offset`.
    Raises:
        ValueError: `synchronization` is NONE, aggregation is MEAN with a dtype that is not floating, or the initial
            value has another shape.

    Example:
        >>> strategy = ms.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     total = ms.Variable([0.0, 0.0], aggregation=ms.VariableAggregation.SUM, name="total")
        >>> results = strategy.run(lambda: total.assign_add(np.ones(2, "f4")))  # both replicas add ones
        >>> total.read_value(), total.value().tolist(), total.numpy().shape
        (array([2., 2.], dtype=float32), [2.0, 2.0], (2,))

    Example:
        >>> table = ms.Variable([1.0, 2.0, 3.0])
        >>> table.assign([2.0, 4.0, 6.0]), table.assign_sub([1.0, 1.0, 1.0])
        (array([2., 4., 6.], dtype=float32), array([1., 3., 5.], dtype=float32))
        >>> table.load_state(table.state() * 2)
        >>> table.sparse_read([2, 0])
        array([10.,  2.], dtype=float32)

    Example:
        >>> table, rows = ms.Variable([1.0, 2.0, 3.0]), ms.IndexedSlices([4.0], [1])
        >>> table.scatter_add(rows), table.scatter_sub(rows)  # 2 + 4, 6 - 4
        (array([1., 6., 3.], dtype=float32), array([1., 2., 3.], dtype=float32))
        >>> changes = table.scatter_mul(rows), table.scatter_div(rows), table.scatter_min(rows)
        >>> table.scatter_max(rows), table.scatter_update(rows)
        (array([1., 4., 3.], dtype=float32), array([1., 4., 3.], dtype=float32))
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
        """Return the value. The program must not write to the array.

        Returns: inside `run`, this replica's copy. Outside `run`, the first copy on this rank; of an ON_READ variable,
            the copies of all ranks, combined as `aggregation` says.
        """
        raise NotImplementedError

    def _update(self, method: str, operand: Any) -> Any:
        raise NotImplementedError

    def state(self) -> Array:
        """Return a copy of the value for a checkpoint, one array. Called by: every rank, if the variable is ON_READ."""
        raise NotImplementedError

    def load_state(self, state: Any) -> None:
        """Set every copy from an array that `state` returned. Called by: every rank."""
        self._update("assign", state)

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the value's dimensions; () for a number.

        Example:
            >>> table = ms.Variable([[1.0, 2.0]])
            >>> table.shape, table.dtype
            ((1, 2), dtype('float32'))
        """
        raise NotImplementedError

    @property
    def ndim(self) -> int:
        """The number of the value's dimensions; 0 for a number.

        Example:
            >>> ms.Variable([[1.0, 2.0]]).ndim
            2
        """
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """The dtype of the array that `read_value` returns, as its library (NumPy, torch or CuPy) gives it."""
        raise NotImplementedError

    def value(self) -> Array:
        """Return the same as `read_value`."""
        return self.read_value()

    def numpy(self) -> Any:
        """Return `read_value` as a NumPy array."""
        return arrays.to_numpy(self.read_value())

    def _read(self) -> Array:
        return self.read_value()

    def sparse_read(self, indices: Any) -> Array:
        """Return the rows at `indices`. Args: indices: integers of shape [n]. Returns: an array of shape [n, ...]."""
        return self.read_value()[indices]

    def assign(self, value: Any) -> Any:
        """Set the value. Inside `run`, `aggregation` says how the replicas' values are combined first.

        With aggregation NONE, or an ON_READ variable, a replica inside `run` sets its own copy.

        Returns: the value after the update, as `read_value` returns it; the variable itself if it is sharded; None for
            an ON_READ variable with aggregation NONE outside `run`.
        """
        return self._update("assign", value)

    def assign_add(self, delta: Any) -> Any:
        """Add `delta`, like `assign`. Returns: the value after the update."""
        return self._update("assign_add", delta)

    def assign_sub(self, delta: Any) -> Any:
        """Subtract `delta`, like `assign`. Returns: the value after the update."""
        return self._update("assign_sub", delta)

    def scatter_add(self, slices: IndexedSlices) -> Any:
        """Add `slices.values` to the rows at `slices.indices`. An index may occur more than once."""
        return self._update("scatter_add", slices)

    def scatter_sub(self, slices: IndexedSlices) -> Any:
        """Subtract `slices.values` from the rows at `slices.indices`. An index may occur more than once."""
        return self._update("scatter_sub", slices)

    def scatter_mul(self, slices: IndexedSlices) -> Any:
        """Multiply the rows at `slices.indices` by `slices.values`."""
        return self._update("scatter_mul", slices)

    def scatter_div(self, slices: IndexedSlices) -> Any:
        """Divide the rows at `slices.indices` by `slices.values`."""
        return self._update("scatter_div", slices)

    def scatter_min(self, slices: IndexedSlices) -> Any:
        """Lower the rows at `slices.indices` to the minimum of both."""
        return self._update("scatter_min", slices)

    def scatter_max(self, slices: IndexedSlices) -> Any:
        """Raise the rows at `slices.indices` to the maximum of both."""
        return self._update("scatter_max", slices)

    def scatter_update(self, slices: IndexedSlices) -> Any:
        """Replace the rows at `slices.indices` by `slices.values`."""
        return self._update("scatter_update", slices)

    def __repr__(self) -> str:
        kind = type(self).__name__
        shape = tuple(self.shape)
        return f"<{kind} {self.name!r} shape={shape} dtype={self.dtype}{self._shown()}>"

    def _shown(self) -> str:
        """Return the value for `repr`, as far as this rank knows it without asking another rank."""
        return ""


def _refusal(method: str) -> Any:
    def refused(self: Variable, *args: Any) -> None:
        raise RuntimeError(
            f"variable {self.name!r} cannot be changed by an operator such as `-=`, nor by `variable[i] = …`: the "
            f"result would be a plain array. Call variable.{method}(…), which changes all copies, or write "
            "`array = variable - …` for a new array"
        )

    return refused


# The methods that change a variable as these operators change an array.
_METHODS = {f"i{name}": "assign" for name in BINARY_OPERATORS}
_METHODS.update(iadd="assign_add", isub="assign_sub", setitem="scatter_update")
for _name, _method in _METHODS.items():
    setattr(Variable, f"__{_name}__", _refusal(_method))


class PlainVariable(Variable):
    """A variable of one array. It belongs to a strategy of one replica, or is a copy in a `DistributedVariable`.

    An update makes a new array.

    Attributes:
        readers: devices of this rank's replicas, if the array is on another device than they compute on. A read inside
            `run` copies the array to the replica's device. Empty if all are on one device.
    """

    readers: Sequence[str] = ()
    _container: DistributedVariable  # only a copy has it

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
        self.strategy: AnyStrategy | None = None  # a component's container has it

    def _kept(self, value: Array) -> Array:
        """Return the array that the variable keeps at first: a copy of `value`."""
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

    def _shown(self) -> str:
        return f" value={self._array}"

    def _update(self, method: str, operand: Any) -> Array:
        # An update makes a new array, so that an array that was read before keeps its values.
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
        """Return the local index of the replica that this thread runs; None outside `run`.

        Raises: RuntimeError if another strategy than the variable's is in force.
        """
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
        """Update the variable: outside `run` all copies, inside `run` as the subclass does.

        Raises: NotImplementedError for scatter_min, scatter_max and scatter_update with aggregation SUM or MEAN.
        """
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
        """Return the `values` of all ranks' replicas, combined as `aggregation` says. Called by: every rank.

        Args: values: this rank's values, one for each replica. what: words for messages, such as "read of".
        """
        ops = self.strategy.extended.cross_replica_ops
        return ops.aggregate(self.aggregation, values, f"{what} {self.name!r}")

    def _update_all(self, method: str, operand: Any) -> None:
        if isinstance(operand, Variable):
            operand = operand.read_value()
        elif isinstance(operand, DistributedValues):
            raise ValueError(
                f"variable {self.name!r}: {method} outside run takes one value for all replicas, "
                f"got a {type(operand).__name__}, and the copies would differ; reduce it first"
            )
        for component in self._values:
            component._update(method, operand)

    _read = Variable._read
    _operand = Variable._operand


class MirroredVariable(DistributedVariable):
    """An ON_WRITE variable: an update inside `run` combines the operands of all replicas, so that copies stay equal.

    With `VariableAggregation.NONE`, an update inside `run` changes only the replica's own copy.
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
    """An ON_READ variable: each replica changes its own copy, and a read outside `run` combines the copies.

    Inside `Strategy.replica()` the program's loop changes its replica's copy, and a read combines all copies.
    """

    def read_value(self) -> Array:
        """Return this replica's copy inside `run`; elsewhere the copies of all ranks, combined by a collective.

        Called by: every rank, outside `run`.
        Raises: ValueError outside `run` with `VariableAggregation.NONE`.
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

    def _operand(self, name: str) -> Any:
        if name in _LOCAL_OPERATORS and current_local_replica() is None:
            raise TypeError(
                f"variable {self.name!r} is ON_READ: outside run its value needs all ranks, and this operator does not "
                "ask them. Call variable.read_value() on every rank, and use its result"
            )
        return self.read_value()

    def state(self) -> Array:
        return arrays.copy(self.read_value())

    def load_state(self, state: Any) -> None:
        """Set every copy, so that the combined value is `state`. Called by: every rank.

        Each copy gets `state`; with aggregation SUM, `state` divided by the number of replicas. Integers are divided
        without loss, unlike in tf.distribute: the copies of the first replicas get 1 more.
        """
        self._update_all("assign", state)
        if self.aggregation is VariableAggregation.SUM:
            n = self.strategy.num_replicas_in_sync
            first = self.strategy.extended.first_replica_id
            for replica, copy in enumerate(self._values, first):
                total = copy.read_value()
                if arrays.is_integer(total):
                    has_one_more = total % n > replica
                    part = total // n + has_one_more
                else:
                    part = total / n
                copy.load_state(arrays.cast_like(part, total))

    def _update(self, method: str, operand: Any) -> Any:
        """Update this replica's copy inside `run`, or all copies outside.

        Returns: inside `run`, the replica's new copy; outside, the combined value, or None with aggregation NONE.
        Raises: NotImplementedError for scatter methods. ValueError outside `run` with aggregation SUM, except for
            `assign`.
        """
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
        if self.aggregation is VariableAggregation.NONE:
            return None
        return self.read_value()


def check_strategy(variable: Any) -> None:
    """Raise RuntimeError if another strategy than the variable's is in force."""
    if has_strategy() and get_strategy() is not variable.strategy:
        raise RuntimeError(
            f"variable {variable.name!r} belongs to {variable.strategy} and was used while "
            f"{get_strategy()} is in force; strategies must not be mixed"
        )
