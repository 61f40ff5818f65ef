"""What a variable begins with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Set
from typing import Any, NamedTuple

from mpistrat import arrays


def initial_array(
    initial_value: Any, dtype: Any, shape: tuple[int, ...] | None = None
) -> arrays.Array:
    """A variable's first value: `initial_value`, or what it returns, as an array of `dtype`.

    Raises: TypeError when it is not numbers; ValueError when it is None, or its shape is not `shape`.
    """
    if initial_value is None:
        raise ValueError("a variable needs an initial value, got None")
    if shape is not None and takes_parts(initial_value):
        return called_for_part(initial_value, dtype, shape)
    value = initial_value() if callable(initial_value) else initial_value
    read = arrays.detach_read(value)
    if not arrays.is_array(read):
        read = arrays.as_operand(read) if dtype is None else arrays.as_array(read)
    if getattr(read.dtype, "hasobject", False):  # other ranks would take its pointers for their own
        raise TypeError(f"a variable holds numbers, got an array of {read.dtype} objects")
    if shape is not None and tuple(read.shape) != shape:
        raise ValueError(
            f"the initial value has shape {list(read.shape)}, shape={list(shape)} was given"
        )
    return read if dtype is None else arrays.cast(read, dtype)


class ShardInfo(NamedTuple):
    """A part of a variable: its shape, and the place of its first element in the whole. As in TensorFlow."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]


def takes_parts(initial_value: Any) -> bool:
    """Whether it is a function of `shard_info`, or of `partition_shape` and `partition_offset`, as TensorFlow's are."""
    parameters = _parameters(initial_value)
    return "shard_info" in parameters or {"partition_shape", "partition_offset"} <= parameters


def _parameters(fn: Any) -> Set[str]:
    try:
        return inspect.signature(fn).parameters.keys()
    except (TypeError, ValueError):  # no function, or one that does not say
        return frozenset()


def called_for_part(
    fn: Callable[..., Any], dtype: Any, shape: tuple[int, ...], first: int = 0
) -> arrays.Array:
    """The initial value of the part of a variable that begins at row `first`."""
    offset = tuple([first, *[0] * (len(shape) - 1)][: len(shape)])
    if "shard_info" in _parameters(fn):
        keywords: dict[str, Any] = {"shard_info": ShardInfo(shape, offset)}
    else:
        keywords = {"partition_shape": shape, "partition_offset": offset}
    return initial_array(lambda: fn(**keywords), dtype, shape)
