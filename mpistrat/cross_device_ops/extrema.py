"""Maxima, minima and products of the components of one value.

Floats are compared as integers in the same order, with NaN at the end that wins: so the result has the same bits in
whatever order they are compared, and whoever compares them. MPI may drop a NaN.
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

# What communicators call them.
OPS = {ReduceOp.MAX: "max", ReduceOp.MIN: "min", ReduceOp.PRODUCT: "prod"}
_INTEGERS = {"float32": "int32", "float64": "int64"}
_FLOATS = {integer: floating for floating, integer in _INTEGERS.items()}


def of_rank(op: ReduceOp, components: Sequence[Any]) -> Array:
    """What a rank contributes of a value. The ranks' are combined, and then `restored`.

    Args: components: as of `accumulation.sum_of`.
    """
    values = [_comparable(op, value) for value in operands(op, components)]
    xp = api.array_namespace(values[0])
    combine = {ReduceOp.MAX: xp.maximum, ReduceOp.MIN: xp.minimum}.get(op, operator.mul)
    return functools.reduce(combine, values)


def operands(op: ReduceOp, components: Sequence[Any]) -> list[Array]:
    """As `accumulation.operands`; booleans as integers, and shorter floats as float32.

    Raises: NotImplementedError, InvalidArgumentError: they have no such reduction, or are not alike.
    """
    values = accumulation.operands(components)
    if any(isinstance(value, IndexedSlices) for value in values):
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
    """The result in the dtype of `like`, one of the components, from what the ranks' `of_rank` combine to."""
    component = accumulation.operand(like)
    xp = api.array_namespace(total)
    integer = arrays.dtype_name(total)
    if op is not ReduceOp.PRODUCT and arrays.is_floating(component) and integer in _FLOATS:
        total = _reordered(total).view(arrays.dtype_like(_FLOATS[integer], total))
    return arrays.cast(xp.asarray(total, device=api.device(total)), component.dtype)


def product(factors: Array) -> Array:
    """Of all along the first axis, one after the other."""
    return functools.reduce(operator.mul, factors)


def over_axes(op: ReduceOp, component: Any, axis: int | Sequence[int]) -> Array:
    """The reduction of one component along `axis`, one or several, in its own dtype.

    Of no elements it is what changes no other: for MAX the least number, minus infinity of floats.
    """
    (value,) = operands(op, [component])
    dtype = accumulation.operand(component).dtype
    axes = arrays.check_axes(value, axis)
    xp = api.array_namespace(value)
    if op is ReduceOp.PRODUCT:
        reduced = xp.prod(value, axis=axes, dtype=value.dtype)
    elif 0 not in [value.shape[i] for i in axes]:
        reduced = {ReduceOp.MAX: xp.max, ReduceOp.MIN: xp.min}[op](value, axis=axes)
    else:
        least, greatest = _limits(value)
        zeros = arrays.zeros(np.delete(value.shape, axes).tolist(), value)
        reduced = zeros + {ReduceOp.MAX: least, ReduceOp.MIN: greatest}[op]
    return arrays.cast(xp.asarray(reduced, device=api.device(value)), dtype)


def _widened(value: Array) -> Array:
    if arrays.is_bool(value):
        return arrays.cast(value, "uint8")
    short = arrays.dtype_name(value).startswith(SUMMED_AS_FLOAT32)
    return arrays.cast(value, "float32") if short else value


def _comparable(op: ReduceOp, value: Array) -> Array:
    """Floats as integers in the same order. Other dtypes stay as they are; so do arrays that XLA compares itself."""
    integer = _INTEGERS.get(arrays.dtype_name(value))
    if op is ReduceOp.PRODUCT or integer is None or arrays.is_on_xla(value):
        return value
    xp = api.array_namespace(value)
    ordered = _reordered(value.view(arrays.dtype_like(integer, value)))
    least, greatest = _limits(ordered)
    winning = {ReduceOp.MAX: greatest, ReduceOp.MIN: least}[op]
    return xp.where(value != value, xp.full_like(ordered, winning), ordered)


def _limits(like: Array) -> tuple[Any, Any]:
    """The least and the greatest number of the dtype of `like`."""
    if arrays.is_floating(like):
        return -math.inf, math.inf
    limits = api.array_namespace(like).iinfo(like.dtype)
    return limits.min, limits.max


def _reordered(bits: Array) -> Array:
    """Integers in the order of the floats of which these are the bits, and back."""
    xp = api.array_namespace(bits)
    # Of a negative float, all bits but the sign.
    return xp.where(bits < 0, bits ^ xp.full_like(bits, xp.iinfo(bits.dtype).max), bits)
