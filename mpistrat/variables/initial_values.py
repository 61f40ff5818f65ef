"""Makes the array that a variable begins with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Set
from typing import Any, NamedTuple

from mpistrat import arrays


def initial_array(
    initial_value: Any, dtype: Any, shape: tuple[int, ...] | None = None
) -> arrays.Array:
    """Return a variable's first value as an array of `dtype`.

    Args:
        initial_value: an array, numbers, or a function that returns one of them. A function that makes parts
            (`takes_parts`) is called for the whole variable, and needs `shape`.
        dtype: dtype to convert to. None keeps the dtype of an array, and makes float32 of Python's floats.
        shape: expected shape; None accepts any.
    Raises: TypeError if the value is not numbers; ValueError if `initial_value` is None, or if the shape differs.
    """
    if initial_value is None:
        raise ValueError("a variable needs an initial value, got None")
    if shape is not None and takes_parts(initial_value):
        return called_for_part(initial_value, dtype, shape)
    value = initial_value() if callable(initial_value) else initial_value
    read = arrays.detach_read(value)
    read = arrays.as_operand(read) if dtype is None else arrays.as_array(read)
    # Other ranks would get the pointers of an array of objects as numbers.
    if getattr(read.dtype, "hasobject", False):
        raise TypeError(f"a variable holds numbers, got an array of {read.dtype} objects")
    if shape is not None and tuple(read.shape) != shape:
        raise ValueError(
            f"the initial value has shape {list(read.shape)}, shape={list(shape)} was given"
        )
    return read if dtype is None else arrays.cast(read, dtype)


class ShardInfo(NamedTuple):
    """Tells a variable's initializer to return only one part of a split variable, as in TensorFlow.

    `shape` is the part's shape, `offset` the index of the part's first element in the whole variable.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]


def takes_parts(initial_value: Any) -> bool:
    """Whether `initial_value` is a function that can make a part of a variable, as TensorFlow's initializers can.

    Such a function has the parameter `shard_info`, or the parameters `partition_shape` and `partition_offset`.
    """
    parameters = _parameters(initial_value)
    return "shard_info" in parameters or {"partition_shape", "partition_offset"} <= parameters


def _parameters(fn: Any) -> Set[str]:
    try:
        return inspect.signature(fn).parameters.keys()
    except (TypeError, ValueError):  # no function, or a builtin without a signature
        return frozenset()


def called_for_part(
    fn: Callable[..., Any], dtype: Any, shape: tuple[int, ...], first: int = 0
) -> arrays.Array:
    """Call a variable's initializer for one part (some rows) of the variable, and return the part as an array.

    Args:
        fn: a function for which `takes_parts` is true.
        dtype: dtype to convert to; None keeps the dtype of an array.
        shape: shape of the part.
        first: row of the whole variable where the part begins.
    Raises: the errors of `initial_array`.
    """
    dims = len(shape)
    offset = (first, *[0] * dims)[:dims]
    if "shard_info" in _parameters(fn):
        keywords: dict[str, Any] = {"shard_info": ShardInfo(shape, offset)}
    else:
        keywords = {"partition_shape": shape, "partition_offset": offset}
    return initial_array(lambda: fn(**keywords), dtype, shape)
