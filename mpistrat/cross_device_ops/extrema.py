"""Maxima, minima and products of the components of one value.

MAX and MIN of float32 and float64 compare integers that have the order of the floats; NaN is the greatest
for MAX and the least for MIN. So a NaN on any rank makes the result NaN, and the order of comparisons does not change
the result's bits. MPI's own maxima of floats may drop a NaN.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import array_api_compat as api
import numpy as np

from mpistrat import arrays
from mpistrat.arrays import Array
from mpistrat.communicators.reduction.arithmetic import SUMMED_AS_FLOAT32
from mpistrat.cross_device_ops import accumulation
from mpistrat.errors import InvalidArgumentError
from mpistrat.indexed_slices import IndexedSlices
from mpistrat.reduce_op import ReduceOp

# The communicators' names of these operations.
OPS = {ReduceOp.MAX: "max", ReduceOp.MIN: "min", ReduceOp.PRODUCT: "prod"}
_INTEGERS = {"float32": "int32", "float64": "int64"}
_FLOATS = {integer: floating for floating, integer in _INTEGERS.items()}


def of_rank(op: ReduceOp, components: Sequence[Any]) -> Array:
    """Combine this rank's components by MAX, MIN or PRODUCT, in the form that ranks then exchange.

    The caller all-reduces the result by the same operation, then passes it to `restored`.

    Args: components: arrays, numbers or variables of this rank's replicas.

    Returns: one array. Booleans are uint8 there, and floats of 16 and 8 bits are float32. For MAX and MIN, floats are
        then integers of their order (see `_comparable`), except on XLA devices.
    """
    values = [_comparable(op, value) for value in operands(op, components)]
    xp = api.array_namespace(values[0])
    combine = {
        ReduceOp.MAX: xp.maximum,
        ReduceOp.MIN: xp.minimum,
        ReduceOp.PRODUCT: operator.mul,
    }
    return functools.reduce(combine[op], values)


def operands(op: ReduceOp, components: Sequence[Any]) -> list[Array]:
    """Return components as arrays without autograd on the first one's device.

    Booleans become uint8, and floats of 16 and 8 bits float32.

    Raises: NotImplementedError for IndexedSlices. InvalidArgumentError if shapes or dtypes differ, or for MAX and MIN
        of complex numbers.
    """
    values = accumulation.operands(components)
    if IndexedSlices in {type(value) for value in values}:
        raise NotImplementedError(
            f"IndexedSlices have sums and means, and no {op.name}: make them dense arrays first"
        )
    accumulation.check_alike(values)
    if op is not ReduceOp.PRODUCT and arrays.dtype_name(values[0]).startswith("complex"):
        raise InvalidArgumentError(
            f"complex numbers ({accumulation.signature(values[0])}) have no {op.name}: reduce their absolute "
            "values, or their real and imaginary parts"
        )
    return [_widened(value) for value in values]


def restored(op: ReduceOp, total: Array, like: Any) -> Array:
    """Return `total`, the combined results of `of_rank` of all ranks, in the dtype of the components.

    Args: like: one of the components that `of_rank` was given.
    """
    component = accumulation.operand(like)
    xp = api.array_namespace(total)
    integer = arrays.dtype_name(total)
    if op is not ReduceOp.PRODUCT and arrays.is_floating(component) and integer in _FLOATS:
        floating = arrays.dtype_like(_FLOATS[integer], total)
        total = _reordered(total).view(floating)
    return arrays.cast(xp.asarray(total, device=api.device(total)), component.dtype)


def product(factors: Array) -> Array:
    """Multiply the elements along the first axis, one after the other. Returns: an array without that axis."""
    return functools.reduce(operator.mul, factors)


def over_axes(op: ReduceOp, component: Any, axis: int | Sequence[int]) -> Array:
    """Reduce one component along `axis` by MAX, MIN or PRODUCT, on this rank.

    Called by: `strategy.reduce(axis=)`, before it combines the components.

    Args: axis: one axis, or several.

    Returns: an array of the component's dtype without these axes. If they have no elements, it has neutral values: 1
        for PRODUCT; for MAX minus infinity or the least integer; for MIN infinity or the greatest integer.
    """
    (value,) = operands(op, [component])
    dtype = accumulation.operand(component).dtype
    axes = arrays.check_axes(value, axis)
    xp = api.array_namespace(value)
    if op is ReduceOp.PRODUCT:
        reduced = xp.prod(value, axis=axes, dtype=value.dtype)
    elif 0 not in [value.shape[i] for i in axes]:
        reduce = {ReduceOp.MAX: xp.max, ReduceOp.MIN: xp.min}[op]
        reduced = reduce(value, axis=axes)
    else:
        least, greatest = _limits(value)
        other_sizes = np.delete(value.shape, axes).tolist()
        neutral = {ReduceOp.MAX: least, ReduceOp.MIN: greatest}[op]
        reduced = arrays.zeros(other_sizes, value) + neutral
    return arrays.cast(xp.asarray(reduced, device=api.device(value)), dtype)


def _widened(value: Array) -> Array:
    if arrays.is_bool(value):
        return arrays.cast(value, "uint8")
    if arrays.dtype_name(value).startswith(SUMMED_AS_FLOAT32):
        return arrays.cast(value, "float32")
    return value


def _comparable(op: ReduceOp, value: Array) -> Array:
    """Return integers that compare like the floats in `value`, so that MAX and MIN give NaN if any rank has NaN.

    The integers have the floats' size. NaN becomes the greatest integer for MAX, and the least for MIN.

    Returns: `value` itself for PRODUCT, for dtypes other than float32 and float64, and on XLA devices, because XLA's
        own maxima keep NaN.
    """
    integer = _INTEGERS.get(arrays.dtype_name(value))
    if op is ReduceOp.PRODUCT or integer is None or arrays.is_on_xla(value):
        return value
    xp = api.array_namespace(value)
    bits = value.view(arrays.dtype_like(integer, value))
    ordered = _reordered(bits)
    least, greatest = _limits(ordered)
    winning = {ReduceOp.MAX: greatest, ReduceOp.MIN: least}[op]
    is_nan = value != value
    return xp.where(is_nan, xp.full_like(ordered, winning), ordered)


def _limits(like: Array) -> tuple[Any, Any]:
    """Return the least and the greatest number of the dtype of `like`; infinities for floats."""
    if arrays.is_floating(like):
        return -math.inf, math.inf
    limits = api.array_namespace(like).iinfo(like.dtype)
    return limits.min, limits.max


def _reordered(bits: Array) -> Array:
    """Turn the bits of floats (as integers) into integers of the floats' order; the same call turns them back."""
    xp = api.array_namespace(bits)
    # For a negative float, flip all bits but the sign.
    all_but_sign = xp.full_like(bits, xp.iinfo(bits.dtype).max)
    return xp.where(bits < 0, bits ^ all_but_sign, bits)
