"""Checks the arguments of `Variable`."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from mpistrat import arrays
from mpistrat.reduce_op import VariableAggregation, VariableSynchronization
from mpistrat.variables.initial_values import initial_array


class VariableArguments(NamedTuple):
    """The checked arguments of `Variable`, with defaults in place of None.

    Attributes:
        initial_value: an array, numbers, or a function that returns one of them.
        dtype, shape: dtype and shape that the array must get; None keeps the array's.
        synchronization: ON_WRITE or ON_READ.
    """

    initial_value: Any
    trainable: bool
    name: str
    dtype: Any
    synchronization: VariableSynchronization
    aggregation: VariableAggregation
    shape: tuple[int, ...] | None

    def initial_array(self) -> arrays.Array:
        """Return the whole first value as an array. Raises: the errors of `initial_values.initial_array`."""
        return initial_array(self.initial_value, self.dtype, self.shape)


def checked_arguments(
    initial_value: Any,
    trainable: bool | None,
    name: str | None,
    dtype: Any,
    synchronization: VariableSynchronization,
    aggregation: VariableAggregation,
    shape: Sequence[int] | None,
) -> VariableArguments:
    """Check the arguments of `Variable`, and return them with defaults in place of None and AUTO.

    Called by: `extended.create_variable`.
    Raises: ValueError for no member of an enum, or `synchronization` NONE; TypeError if `trainable`, `name` or a size
        in `shape` has another type.
    """
    for argument, value, kind in (
        ("synchronization", synchronization, VariableSynchronization),
        ("aggregation", aggregation, VariableAggregation),
    ):
        if not isinstance(value, kind):
            raise ValueError(f"{argument} must be a {kind.__name__}, got {value!r:.60}")
    if synchronization is VariableSynchronization.NONE:
        raise ValueError("VariableSynchronization.NONE is not supported; use ON_WRITE or ON_READ")
    if not isinstance(trainable, (bool, type(None))):
        raise TypeError(f"trainable must be True, False or None, got {trainable!r:.60}")
    if not isinstance(name, (str, type(None))):
        raise TypeError(f"name must be a string or None, got {name!r:.60}")
    size = None if shape is None else tuple(operator.index(length) for length in shape)
    if synchronization is not VariableSynchronization.ON_READ:
        synchronization = VariableSynchronization.ON_WRITE
    if trainable is None:
        trainable = synchronization is VariableSynchronization.ON_WRITE
    name = name or "Variable"
    return VariableArguments(
        initial_value, trainable, name, dtype, synchronization, aggregation, size
    )
