"""The updates of arrays behind the methods of variables, and the operands that they take."""

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
    """A new array: `array` after `method`, of the variable `name`, with `operand`."""
    operand = fitting_operand(method, array, operand, name)
    if method.startswith(_SCATTER):
        combine = method.removeprefix(_SCATTER)
        return arrays.scatter(array, operand.indices, operand.values, combine)
    if method == "assign":
        return arrays.copy(operand)
    changed: Array = _CHANGES[method](array, operand)
    return changed


def update_in_place(method: str, array: Array, operand: Any) -> None:
    """`updated`, of an operand that fits, in the memory of `array`."""
    if method.startswith(_SCATTER):
        combine = method.removeprefix(_SCATTER)
        arrays.scatter_into(array, operand.indices, operand.values, combine)
    elif method == "assign":
        array[...] = operand
    else:
        _CHANGES_IN_PLACE[method](array, operand)


def fitting_operand(method: str, array: Array, operand: Any, name: str) -> Any:
    """What `updated` can take: an array, or `IndexedSlices`.

    Raises: TypeError, IndexError, InvalidArgumentError.
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
    if wanted[0] and not arrays.is_on_xla(operand.indices):  # XLA's may be still to be computed
        for index in (int(operand.indices.min()), int(operand.indices.max())):
            if not 0 <= index < array.shape[0]:
                raise _out_of_bounds(index, array.shape[0], name)
    return operand


def fitting(array: Array, operand: Any, name: str) -> Array:
    """`operand` as an array of `array`'s library and dtype, of a shape that needs no stretching of `array`."""
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
    """The numbers that a program gives the variable `name` as an array. Raises: TypeError: they are none."""
    try:
        return arrays.as_array(operand)
    except TypeError as error:
        raise TypeError(f"variable {name!r}: {error}") from None


def check_shape(name: str, shape: tuple[int, ...], operand: Array) -> None:
    """InvalidArgumentError for an operand of another shape than that of the variable `name`."""
    if tuple(operand.shape) != shape:
        raise InvalidArgumentError(
            f"variable {name!r} has shape {list(shape)}, the operand {list(operand.shape)}"
        )


def _converted(operand: Any, array: Array) -> Any:
    """NumPy's numbers, and its arrays where `array` is another library's, as `array` has them; others as they are.

    So does tf.distribute, for which arrays of NumPy are no tensors.
    """
    if not isinstance(operand, (np.ndarray, np.generic)):
        return operand
    foreign = operand.ndim == 0 or not isinstance(array, (np.ndarray, np.generic))
    return arrays.cast_like(operand, array) if foreign and _fits(operand, array) else operand


def _fits(numbers: np.ndarray | np.generic, array: Array) -> bool:
    """Whether nothing but digits of `numbers` is lost in `array`."""
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
    """NumPy's letters of the numbers of which nothing but digits is lost in `array`."""
    if arrays.is_integer(array) or arrays.is_bool(array):
        return "biu"
    return "biufc" if arrays.dtype_name(array).startswith("complex") else "biuf"


def check_is_slices(name: str, operand: Any) -> None:
    """TypeError for an operand that the scatter methods of the variable `name` do not take."""
    if not isinstance(operand, IndexedSlices):
        raise TypeError(
            f"variable {name!r}: scatter methods take IndexedSlices, got {operand!r:.60}"
        )


def check_rows(name: str, indices: np.ndarray, rows: int) -> None:
    """IndexError for an index outside the rows of the variable `name`."""
    outside = indices[(indices < 0) | (indices >= rows)]
    if len(outside):
        raise _out_of_bounds(outside[0], rows, name)


def _out_of_bounds(row: Any, rows: int, name: str) -> IndexError:
    return IndexError(
        f"row {row} of variable {name!r} is out of bounds: it has rows 0 to {rows - 1}"
    )
