"""Reduces values that are equal on all replicas, without communication."""

from __future__ import annotations

from typing import Any

from mpistrat import arrays
from mpistrat.cross_device_ops.accumulation import of_one_replica
from mpistrat.reduce_op import ReduceOp
from mpistrat.values import DistributedValues, Mirrored
from mpistrat.variables.variable import SyncOnReadVariable, Variable

# Reductions that change with the number of copies, and the value that they leave unchanged for any number of copies.
_NEUTRAL = {ReduceOp.SUM: 0, ReduceOp.PRODUCT: 1}


def is_copy_per_replica(value: DistributedValues) -> bool:
    """Whether all components of `value` are equal: it is a `Mirrored`, or a variable but no SyncOnReadVariable."""
    if isinstance(value, Variable):
        return not isinstance(value, SyncOnReadVariable)
    return isinstance(value, Mirrored)


def reduce_equal(op: ReduceOp, value: Any) -> Any:
    """Return `value`, if its reduction over several replicas gives `value` again for any number of replicas.

    Args: value: a value that is the same for all replicas: a mirrored value, or a plain value of the only rank.
    Raises:
        AssertionError: SUM or PRODUCT of a mirrored value.
        ValueError: SUM of a plain value that is not all 0, or PRODUCT of one that is not all 1.
    """
    if op not in _NEUTRAL:
        return of_one_replica(op, value)
    if isinstance(value, DistributedValues):
        raise AssertionError(
            f"{op.name} of a mirrored value would count it once per replica; got {value!r:.80}"
        )
    number = arrays.is_number(value)
    if (number or arrays.is_array(value)) and not (arrays.as_array(value) != _NEUTRAL[op]).any():
        return value  # any number of copies gives the same result
    raise ValueError(
        f"{op.name} needs a value per replica, as run returns it: a plain value might be meant to count "
        f"once, or once per replica; got {value!r:.80}"
    )
