"""What a variable begins with."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from mpistrat import arrays


def initial_array(
    initial_value: Any, dtype: Any, shape: tuple[int, ...] | None = None
) -> arrays.Array:
    """A variable's first value: `initial_value`, or what it returns, as an array of `dtype`.

    Raises: TypeError when it is not numbers; ValueError when its shape is not `shape`.
    """
    if shape is not None and takes_parts(initial_value):
        return called_for_part(initial_value, dtype, shape)
    given = initial_value() if callable(initial_value) else initial_value
    read = arrays.detach_read(given)
    if not arrays.is_array(read):
        read = arrays.as_array(read)
        if dtype is None and arrays.dtype_name(read) == "float64":
            dtype = "float32"  # Python's floats, as in tf.distribute and torch
    if getattr(read.dtype, "hasobject", False):  # other ranks would take its pointers for their own
        raise TypeError(f"a variable holds numbers, got an array of {read.dtype} objects")
    if shape is not None and tuple(read.shape) != shape:
        raise ValueError(
            f"the initial value has shape {list(read.shape)}, shape={list(shape)} was given"
        )
    return read if dtype is None else arrays.cast(read, dtype)


def takes_parts(initial_value: Any) -> bool:
    """Whether it is a function of `partition_shape` and `partition_offset`, as TensorFlow's initializers are."""
    try:
        parameters = inspect.signature(initial_value).parameters
    except (TypeError, ValueError):  # no function, or one that does not say
        return False
    return {"partition_shape", "partition_offset"} <= parameters.keys()


def called_for_part(
    fn: Callable[..., Any], dtype: Any, shape: tuple[int, ...], first: int = 0
) -> arrays.Array:
    """The initial value of the part of a variable that begins at row `first`."""
    offset = tuple([first, *[0] * (len(shape) - 1)][: len(shape)])
    return initial_array(lambda: fn(partition_shape=shape, partition_offset=offset), dtype, shape)
