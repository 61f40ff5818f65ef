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
_CHANGES = {"assign_add": operator.add, "assign_sub": operator.sub}
_CHANGES_IN_PLACE = {"assign_add": operator.iadd, "assign_sub": operator.isub}


def updated(method: str, array: Array, operand: Any, name: str) -> Array:
    """Return a new array: `array` after the update `method` ("assign_add") of variable `name` with `operand`."""
    operand = fitting_operand(method, array, operand, name)
    if method.startswith(_SCATTER):
        combine = method.removeprefix(_SCATTER)
        return arrays.scatter(array, operand.indices, operand.values, combine)
    if method == "assign":
        return arrays.copy(operand)
    changed: Array = _CHANGES[method](array, operand)
    return changed


def update_in_place(method: str, array: Array, operand: Any) -> None:
    """Apply the update `method` to `array` itself.

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
    """Return `operand` as `updated` needs it: an array, or IndexedSlices for a scatter method.

    Raises:
        TypeError: it is not numbers, or the dtype of `array` would cut off a part.
        InvalidArgumentError: its shape or dtype does not fit.
        IndexError: an index is outside the rows.
    """
    if not method.startswith(_SCATTER):
        return fitting(array, operand, name)
    check_is_slices(name, operand)
    rows, wanted = operand.values, (len(operand.indices), *array.shape[1:])
    exact = arrays.is_integer(array) and not arrays.is_integer(rows)
    if not array.shape or tuple(rows.shape) != wanted or exact:
        raise InvalidArgumentError(
            f"variable {name!r} of dtype {arrays.dtype_name(array)} needs rows of shape {list(wanted)} "
            f"for {wanted[0]} indices, got {arrays.dtype_name(rows)} of shape {list(rows.shape)}"
        )
    # Reading XLA's indices would wait for their computation.
    if wanted[0] and not arrays.is_on_xla(operand.indices):
        for index in (int(operand.indices.min()), int(operand.indices.max())):
            if not 0 <= index < array.shape[0]:
                raise _out_of_bounds(index, array.shape[0], name)
    return operand


def fitting(array: Array, operand: Any, name: str) -> Array:
    """Return `operand` as an array of the library, dtype and shape of `array`; it is not broadcast.

    Raises: TypeError for numbers that the dtype would cut; InvalidArgumentError for an array of another dtype or shape.
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
    """Return a program's numbers as an array. Raises: TypeError, with the variable's `name`, if they are no numbers."""
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
    """Convert numbers of NumPy to the library and dtype of `array`, if they fit; return other operands as they are.

    NumPy's arrays are converted only to another library's, as in tf.distribute, where they are no tensors.
    """
    if not isinstance(operand, (np.ndarray, np.generic)):
        return operand
    foreign = operand.ndim == 0 or not isinstance(array, (np.ndarray, np.generic))
    return arrays.cast_like(operand, array) if foreign and _fits(operand, array) else operand


def _fits(numbers: np.ndarray | np.generic, array: Array) -> bool:
    """Whether `numbers` lose nothing but digits in the dtype of `array`."""
    name = arrays.dtype_name(array)
    if not numbers.size or arrays.dtype_name(numbers) == name:
        return True
    if numbers.dtype.kind not in _kinds_that_fit(array):
        return False
    if not arrays.is_integer(array):
        return True
    limits = np.iinfo(name)
    return limits.min <= int(numbers.min()) and int(numbers.max()) <= limits.max


def _kinds_that_fit(array: Array) -> str:
    """Return NumPy's kind letters (`dtype.kind`) of numbers that lose nothing but digits in the dtype of `array`."""
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
