"""Adding up and joining the components of one value, on one rank."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mpistrat import arrays
from mpistrat.arrays import Array
from mpistrat.errors import InvalidArgumentError
from mpistrat.indexed_slices import IndexedSlices


def signature(array: Array) -> str:
    """Dtype and shape: "float32[2, 3]", "torch.float32[2, 3]"."""
    return f"{array.dtype}{list(array.shape)}"


def check_summable(values: Sequence[Array]) -> None:
    """All of one dtype and shape, and numbers; nothing is broadcast or promoted."""
    if arrays.is_bool(values[0]):
        raise InvalidArgumentError(
            f"cannot add up booleans ({signature(values[0])}); cast to an integer, or reduce them with MAX "
            "(any) or MIN (all)"
        )
    check_alike(values)


def check_alike(values: Sequence[Array]) -> None:
    """As `check_summable`, or booleans."""
    first = values[0]
    if not arrays.is_torch(first) and first.dtype.kind in "OSUMm":
        raise InvalidArgumentError(f"cannot reduce {signature(first)}; only numbers can be")
    if len({(value.shape, value.dtype) for value in values}) > 1:
        by_replica = _by_owner(map(signature, values))
        raise InvalidArgumentError(
            f"all replicas must pass the same shape and dtype; got {by_replica}"
        )


def _by_owner(words: Iterable[str], owner: str = "replica") -> str:
    """For people: "replica 0: float32[2], replica 1: float32[3]"."""
    return ", ".join(f"{owner} {number}: {word}" for number, word in enumerate(words))


def sum_of(components: Sequence[Any]) -> Any:
    """What a rank contributes of a value: the sum of its components, cut off from autograd.

    Args: components: arrays, numbers, variables, or IndexedSlices.
    """
    if len(components) == 1:
        value = operand(components[0])
        if not isinstance(value, IndexedSlices) and not is_summable(value.dtype):
            check_summable([value])
        return value
    values = operands(components)
    if are_slices(values):
        return add_slices(values)
    check_summable(values)
    return add_n(values)


def operands(components: Sequence[Any]) -> list[Any]:
    """Numbers and variables as arrays, cut off from autograd, on the device of the first; IndexedSlices as they are."""
    return arrays.on_one_device([operand(component) for component in components])


def operand(component: Any) -> Any:
    """As `operands`, of one."""
    if component.__class__ is np.ndarray or isinstance(component, IndexedSlices):
        return component
    if arrays.is_torch(component) and not component.requires_grad:
        return component
    return arrays.as_array(arrays.detach_read(component))


@functools.cache
def is_summable(dtype: Any) -> bool:
    """Whether arrays of `dtype`, of any library, can be added up."""
    return dtype.kind not in "bOSUMm" if isinstance(dtype, np.dtype) else str(dtype) != "torch.bool"


def add_n(values: Sequence[Array]) -> Array:
    """The sum of `values`, in order; a new array when there is more than one."""
    return functools.reduce(operator.add, values)


def add_slices(values: Sequence[IndexedSlices]) -> IndexedSlices:
    """The sum of sparse values: rows and indices one after the other, duplicates kept."""
    return IndexedSlices(
        arrays.concatenate([v.values for v in values]),
        arrays.concatenate([v.indices for v in values]),
        values[0].dense_shape,
    )


def divide(total: Any, count: int) -> Any:
    """A sum over `count` replicas as their mean."""
    if isinstance(total, IndexedSlices):
        return dataclasses.replace(total, values=arrays.true_divide(total.values, count))
    return arrays.true_divide(total, count)


def are_slices(values: Sequence[Any]) -> bool:
    """Whether the components of one value are IndexedSlices; InvalidArgumentError if only some are."""
    are_sparse = {isinstance(value, IndexedSlices) for value in values}
    if len(are_sparse) > 1:
        by_replica = _by_owner([type(value).__name__ for value in values])
        raise InvalidArgumentError(
            f"all replicas must pass the same kind of value; got {by_replica}"
        )
    return are_sparse.pop()


def check_no_slices(value: Any) -> None:
    if isinstance(value, IndexedSlices):
        raise NotImplementedError(
            "IndexedSlices that are not per replica cannot be gathered; reduce or all_reduce them with SUM"
        )


def as_dense(component: Any) -> Array:
    """A component of any kind, a number or sparse rows too, as an array cut off from autograd.

    Raises: ValueError for sparse rows of an array whose shape is not known.
    """
    if not isinstance(component, IndexedSlices):
        return arrays.as_array(arrays.detach_read(component))
    if component.dense_shape is None:
        raise ValueError(
            f"IndexedSlices become an array of their dense_shape, which those of {signature(component.values)} lack"
        )
    zeros = arrays.zeros([int(size) for size in component.dense_shape], component.values)
    return arrays.scatter(zeros, component.indices, component.values, "add")


def check_joinable(values: Sequence[Array], axis: int, owner: str = "replica") -> int:
    """The axis counted from the front, if `values` can be concatenated along it."""
    first = tuple(values[0].shape)
    if not isinstance(axis, (int, np.integer)):
        raise ValueError(f"axis must be an integer, got {axis!r:.60}")
    if not first:
        raise ValueError("cannot gather scalars; give them an axis first, e.g. value[None]")
    if not -len(first) <= axis < len(first):
        raise ValueError(f"axis {axis} is out of range for arrays of shape {list(first)}")
    axis = int(axis) % len(first)
    if len({(v.dtype, len(v.shape), v.shape[:axis], v.shape[axis + 1 :]) for v in values}) > 1:
        by_owner = _by_owner(map(signature, values), owner)
        raise InvalidArgumentError(
            f"gather along axis {axis} needs one dtype, and shapes that are equal elsewhere; got {by_owner}"
        )
    return axis
