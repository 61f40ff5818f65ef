"""Applies the updates of variables to arrays, and checks their operands."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from mpistrat import arrays
from mpistrat.arrays import Array
from mpistrat.errors import InvalidArgumentError
from mpistrat.indexed_slices import IndexedSlices

_SCATTER = "scatter_"
_OF_NUMPY = (np.ndarray, np.generic)
_CHANGES = {"assign_add": operator.add, "assign_sub": operator.sub}
_CHANGES_IN_PLACE = {"assign_add": operator.iadd, "assign_sub": operator.isub}


def updated(method: str, array: Array, operand: Any, name: str) -> Array:
    """Return the value after an update, in a new array; `array` does not change.

    Args:
        method: name of the variable's method: "assign", "assign_add", "assign_sub" or "scatter_…".
        array: the value before the update.
        operand: the argument of the method.
        name: name of the variable, for messages.
    Raises: the errors of `fitting_operand`.
    """
    operand = fitting_operand(method, array, operand, name)
    if method.startswith(_SCATTER):
        combine = method.removeprefix(_SCATTER)
        return arrays.scatter(array, operand.indices, operand.values, combine)
    if method == "assign":
        return arrays.copy(operand)
    return _CHANGES[method](array, operand)


def update_in_place(method: str, array: Array, operand: Any) -> None:
    """Apply the update `method` ("assign_add") to `array` itself.

    Args:
        operand: the result of `fitting_operand` for the same method and array.
    """
    if method.startswith(_SCATTER):
        combine = method.removeprefix(_SCATTER)
        arrays.scatter_into(array, operand.indices, operand.values, combine)
    elif method == "assign":
        array[...] = operand
    else:
        _CHANGES_IN_PLACE[method](array, operand)


def fitting_operand(method: str, array: Array, operand: Any, name: str) -> Any:
    """Check the operand of an update, and return it as an array like `array`; a scatter method's slices as they are.

    Raises:
        TypeError: `operand` is not numbers (for a scatter method, no IndexedSlices), or the dtype of `array` would cut
            off a part of the numbers.
        InvalidArgumentError: the shape or dtype of `operand` does not fit `array`.
        IndexError: an index of a scatter method is not a row of `array`.
    """
    if not method.startswith(_SCATTER):
        return fitting(array, operand, name)
    check_is_slices(name, operand)
    rows = operand.values
    indices = operand.indices
    wanted = (len(indices), *array.shape[1:])
    loses_fractions = arrays.is_integer(array) and not arrays.is_integer(rows)
    if not array.shape or tuple(rows.shape) != wanted or loses_fractions:
        raise InvalidArgumentError(
            f"variable {name!r} of dtype {arrays.dtype_name(array)} needs rows of shape {list(wanted)} "
            f"for {wanted[0]} indices, got {arrays.dtype_name(rows)} of shape {list(rows.shape)}"
        )
    # Reading XLA's indices would wait for their computation.
    if wanted[0] and not arrays.is_on_xla(indices):
        for index in (int(indices.min()), int(indices.max())):
            if not 0 <= index < array.shape[0]:
                raise _out_of_bounds(index, array.shape[0], name)
    return operand


def fitting(array: Array, operand: Any, name: str) -> Array:
    """Return `operand` as an array of the library, dtype and shape of `array`. A smaller operand is not broadcast.

    Raises: TypeError for numbers of which the dtype would cut off a part (1.5 for an integer); InvalidArgumentError for
        an array of another dtype, and for another shape.
    """
    operand = _converted(arrays.detach_read(operand), array)
    if not arrays.is_array(operand):
        number = numbers_for(name, operand)
        if not _fits(number, array):
            raise TypeError(
                f"variable {name!r} has dtype {arrays.dtype_name(array)}, which would cut off a part of "
                f"{operand!r:.60}; convert it first"
            )
        operand = number
    elif arrays.dtype_name(operand) != arrays.dtype_name(array):
        raise InvalidArgumentError(
            f"variable {name!r} has dtype {arrays.dtype_name(array)}, the operand "
            f"{arrays.dtype_name(operand)}; convert it first"
        )
    value = arrays.cast_like(operand, array)
    check_shape(name, tuple(array.shape), value)
    return value


def numbers_for(name: str, operand: Any) -> np.ndarray:
    """Return `operand` as an array. Raises: TypeError, with the variable's `name`, if it is not numbers."""
    try:
        return arrays.as_array(operand)
    except TypeError as error:
        raise TypeError(f"variable {name!r}: {error}") from None


def check_shape(name: str, shape: tuple[int, ...], operand: Array) -> None:
    """Raise InvalidArgumentError if `operand` has another shape than the variable `name`."""
    if tuple(operand.shape) != shape:
        raise InvalidArgumentError(
            f"variable {name!r} has shape {list(shape)}, the operand {list(operand.shape)}"
        )


def _converted(operand: Any, array: Array) -> Any:
    """Convert a NumPy scalar, or for a variable of another library a NumPy array, to the library and dtype of `array`.

    For a variable of NumPy, a NumPy array is the counterpart of a tensor, and tf.distribute converts no tensor's dtype.

    Returns: the converted array; any other operand as it is, also if the dtype of `array` would cut off a part.
    """
    if not isinstance(operand, _OF_NUMPY):
        return operand
    foreign = operand.ndim == 0 or not isinstance(array, _OF_NUMPY)
    if foreign and _fits(operand, array):
        return arrays.cast_like(operand, array)
    return operand


def _fits(numbers: np.ndarray | np.generic, array: Array) -> bool:
    """Whether the dtype of `array` can hold `numbers`, if rounding is allowed.

    False if an integer would lose a fraction or overflow, or if a real number would lose an imaginary part.
    """
    name = arrays.dtype_name(array)
    if not numbers.size or arrays.dtype_name(numbers) == name:
        return True
    if numbers.dtype.kind not in _kinds_that_fit(array):
        return False
    if not arrays.is_integer(array):
        return True
    limits = np.iinfo(name)
    least = int(numbers.min())
    greatest = int(numbers.max())
    return limits.min <= least and greatest <= limits.max


def _kinds_that_fit(array: Array) -> str:
    """Return the kinds of numbers that the dtype of `array` can hold, as letters of NumPy's `dtype.kind`: "biu"."""
    if arrays.is_integer(array) or arrays.is_bool(array):
        return "biu"
    return "biufc" if arrays.dtype_name(array).startswith("complex") else "biuf"


def check_is_slices(name: str, operand: Any) -> None:
    """Raise TypeError if `operand`, for a scatter method of the variable `name`, is no IndexedSlices."""
    if not isinstance(operand, IndexedSlices):
        raise TypeError(
            f"variable {name!r}: scatter methods take IndexedSlices, got {operand!r:.60}"
        )


def check_rows(name: str, indices: np.ndarray, rows: int) -> None:
    """Raise IndexError if one of `indices` is not a row of the variable `name`, from 0 to `rows` - 1."""
    outside = indices[(indices < 0) | (indices >= rows)]
    if len(outside):
        raise _out_of_bounds(outside[0], rows, name)


def _out_of_bounds(row: Any, rows: int, name: str) -> IndexError:
    return IndexError(
        f"row {row} of variable {name!r} is out of bounds: it has rows 0 to {rows - 1}"
    )
