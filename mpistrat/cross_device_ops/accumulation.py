"""Adds up and checks the components of one value (its replicas' arrays), on one rank."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat import arrays
from mpistrat.arrays import Array
from mpistrat.communicators import Communicator
from mpistrat.errors import InvalidArgumentError
from mpistrat.indexed_slices import IndexedSlices
from mpistrat.reduce_op import ReduceOp
from mpistrat.values import by_owner


def signature(array: Array) -> str:
    """Return the array's dtype and shape as text: "float32[2, 3]", "torch.float32[2, 3]"."""
    return f"{array.dtype}{list(array.shape)}"


def check_summable(values: Sequence[Array]) -> None:
    """Check that `values` are numbers of one dtype and shape; nothing is broadcast or promoted.

    Raises: InvalidArgumentError if they differ, or are booleans or no numbers.
    """
    if arrays.is_bool(values[0]):
        raise InvalidArgumentError(
            f"cannot add up booleans ({signature(values[0])}); cast to an integer, or reduce them with MAX "
            "(any) or MIN (all)"
        )
    check_alike(values)


def check_alike(values: Sequence[Array]) -> None:
    """Check that `values` are numbers or booleans of one dtype and shape.

    Raises: InvalidArgumentError if they differ, or are no numbers.
    """
    first = values[0]
    if not arrays.is_torch(first) and first.dtype.kind in "OSUMm":
        raise InvalidArgumentError(f"cannot reduce {signature(first)}; only numbers can be reduced")
    if len({(value.shape, value.dtype) for value in values}) > 1:
        by_replica = by_owner(values, signature)
        raise InvalidArgumentError(
            f"all replicas must pass the same shape and dtype; got {by_replica}"
        )


def _kind_of(value: Any) -> str:
    return type(value).__name__


def sum_of(components: Sequence[Any]) -> Any:
    """Return the sum of a value's components on this rank, without autograd; int64 for narrow integers.

    Args: components: arrays, numbers, variables, or IndexedSlices. They keep their values.

    Returns: a single component itself (as an array), and not a copy, unless its integers are narrow.

    Raises: InvalidArgumentError if dtypes or shapes differ, for booleans, or if only some are IndexedSlices.
    """
    if len(components) == 1:
        value = operand(components[0])
        if not isinstance(value, IndexedSlices) and not is_summable(value.dtype):
            check_summable([value])
        return widened(value)
    values = operands(components)
    if are_slices(values):
        return add_slices(values)
    check_summable(values)
    return add_n([widened(value) for value in values])


def _dtype_of(value: Any) -> Any:
    return getattr(value, "dtype", None)


def widened(value: Any) -> Any:
    """Return an array of narrow integers (`arrays.is_narrow`) as int64, and any other value itself."""
    if arrays.is_narrow(_dtype_of(value)):
        return arrays.cast(value, "int64")
    return value


def narrow_dtypes(values: Sequence[Sequence[Any]]) -> str:
    """Return the narrow dtypes among `values`, as text for a label that ranks compare: "int8 uint8 "; "" for none.

    Args: values: for each value, its components.
    """
    text = ""
    for components in values:
        dtype = _dtype_of(components[0])
        if arrays.is_narrow(dtype):
            text += f"{arrays.name_of_dtype(dtype)} "
    return text


def narrowed(
    communicator: Communicator, totals: Sequence[Any], values: Sequence[Sequence[Any]]
) -> list[Any]:
    """Return sums and means of `widened` values in the dtypes of results. Called by: every rank of `communicator`.

    Args:
        totals: for each value, its sum over all ranks, or its mean as float64.
        values: for each value, its components before they were widened.

    Returns: sums in the dtypes of the components; means of integers of 8 and 16 bits as float32; other totals as
        they are.

    Raises: InvalidArgumentError, on all ranks, if a sum does not fit. On XLA devices it wraps around instead, because
        reading it would wait for its computation.
    """
    with communicator.raising_together():
        pairs = zip(totals, values, strict=True)
        return [_narrowed(total, _dtype_of(components[0])) for total, components in pairs]


def _narrowed(total: Any, dtype: Any) -> Any:
    if not arrays.is_narrow(dtype):
        return total
    if arrays.is_floating(total):
        if dtype.itemsize <= 2:
            return arrays.cast(total, "float32")
        return total
    result = arrays.cast(total, dtype)
    if not arrays.is_on_xla(total) and (result != total).any():
        raise InvalidArgumentError(
            f"a sum of {arrays.name_of_dtype(dtype)} values does not fit its dtype: it has a number of magnitude "
            f"{int(abs(total).max())}, on all ranks. Convert the values to int64 before the call, or ask for the mean"
        )
    return result


def of_one_replica(op: ReduceOp, value: Any) -> Any:
    """Return the reduction of `value` over one replica: a mean of integers is a float, any other value is itself."""
    if op is ReduceOp.MEAN:
        dtype = arrays.name_of_dtype(_dtype_of(value))
        if dtype.startswith(("int", "uint")):
            return divide(arrays.detach_read(value), 1)
    return value


def operands(components: Sequence[Any]) -> list[Any]:
    """Return all components as arrays without autograd, on the first component's device; IndexedSlices as they are."""
    return arrays.on_one_device([operand(component) for component in components])


def operand(component: Any) -> Any:
    """Return a component (array, number, variable) as an array without autograd; IndexedSlices as they are."""
    if component.__class__ is np.ndarray or isinstance(component, IndexedSlices):
        return component
    if arrays.is_torch(component) and not component.requires_grad:
        return component
    return arrays.as_array(arrays.detach_read(component))


@functools.cache
def is_summable(dtype: Any) -> bool:
    """Whether arrays of `dtype`, of any library, can be added up."""
    if isinstance(dtype, np.dtype):
        return dtype.kind not in "bOSUMm"
    return str(dtype) != "torch.bool"


def add_n(values: Sequence[Array]) -> Array:
    """Return the sum of `values`, in order: a new array, or the value itself if there is only one."""
    return functools.reduce(operator.add, values)


def add_slices(values: Sequence[IndexedSlices]) -> IndexedSlices:
    """Return the sum of IndexedSlices: the rows of all of them, and their indices, concatenated; an index may recur."""
    rows = arrays.concatenate([slices.values for slices in values])
    indices = arrays.concatenate([slices.indices for slices in values])
    return IndexedSlices(rows, indices, values[0].dense_shape)


def divide(total: Any, count: int) -> Any:
    """Divide a sum over `count` replicas: return their mean."""
    if isinstance(total, IndexedSlices):
        return dataclasses.replace(total, values=arrays.true_divide(total.values, count))
    return arrays.true_divide(total, count)


def are_slices(values: Sequence[Any]) -> bool:
    """Whether all components of one value are IndexedSlices. Raises: InvalidArgumentError if only some of them are."""
    are_sparse = {isinstance(value, IndexedSlices) for value in values}
    if len(are_sparse) > 1:
        by_replica = by_owner(values, _kind_of)
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
    """Return a component (array, number, variable, IndexedSlices) as a dense array without autograd.

    IndexedSlices become an array of `dense_shape`: rows with the same index are added up, other rows are zero.

    Raises: ValueError for IndexedSlices without `dense_shape`.
    """
    if not isinstance(component, IndexedSlices):
        return arrays.as_array(arrays.detach_read(component))
    if component.dense_shape is None:
        raise ValueError(
            f"IndexedSlices of {signature(component.values)} need a dense_shape to become a dense array, and have none"
        )
    shape = [int(size) for size in component.dense_shape]
    zeros = arrays.zeros(shape, component.values)
    return arrays.scatter(zeros, component.indices, component.values, "add")


def check_joinable(values: Sequence[Array], axis: int, owner: str = "replica") -> int:
    """Check that `values` can be concatenated along `axis`.

    Args: owner: the word for the owner of each value, in messages: "replica" or "rank".

    Returns: the axis, counted from the front, >= 0.

    Raises: ValueError for scalars or an axis out of range. InvalidArgumentError if dtypes or other sizes differ.
    """
    first = tuple(values[0].shape)
    dims = len(first)
    if not isinstance(axis, (int, np.integer)):
        raise ValueError(f"axis must be an integer, got {axis!r:.60}")
    if not first:
        raise ValueError("cannot gather scalars; give them an axis first, e.g. value[None]")
    if not -dims <= axis < dims:
        raise ValueError(f"axis {axis} is out of range for arrays of shape {list(first)}")
    axis = int(axis) % dims
    kinds = set()
    for value in values:
        sizes = value.shape
        kinds.add((value.dtype, len(sizes), sizes[:axis], sizes[axis + 1 :]))
    if len(kinds) > 1:
        got = by_owner(values, signature, owner)
        raise InvalidArgumentError(
            f"gather along axis {axis} needs one dtype, and shapes that are equal elsewhere; got {got}"
        )
    return axis
