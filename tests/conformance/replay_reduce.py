"""Areas reduce and gather: one value from all replicas', in cross-replica context."""

from __future__ import annotations

from typing import Any

import numpy as np

import mpistrat as ms
from conformance.outcomes import CannotInterpret
from conformance.stage import Handler, Stage


def _axis(stage: Stage) -> Any:
    """Several axes are a list in JSON; it was one in the program only where the quirk says so."""
    axis = stage.program["axis"]
    was_list = stage.case.get("quirk", "").startswith("list axis")
    return tuple(axis) if isinstance(axis, list) and not was_list else axis


def _with_dense(stage: Stage, value: Any) -> Any:
    """Sparse results are recorded a second time, as a dense array."""
    result = {"value": value}
    if "dense" in stage.case["expect"]:
        result["dense"] = _densified(stage, value)
    return result


def _densified(stage: Stage, value: Any) -> Any:
    if not isinstance(value, ms.IndexedSlices):
        return value
    rows = np.asarray(value.values)
    dense = np.zeros([int(size) for size in value.dense_shape], rows.dtype)
    np.add.at(dense, np.asarray(value.indices), rows)
    return stage.array(dense, str(rows.dtype))


def reduce(stage: Stage) -> Any:
    strategy = stage.strategy()
    operand = stage.per_replica(strategy, stage.decode_all(stage.inputs["values"]))
    value = strategy.reduce(stage.program["reduce_op"], operand, axis=_axis(stage))
    return _with_dense(stage, value)


def reduce_plain(stage: Stage) -> Any:
    """The note says which operands are NumPy arrays and which are tensors; so does the library."""
    strategy = stage.strategy()
    operand = stage.decode(stage.inputs["value"])
    return {"value": strategy.reduce(stage.program["reduce_op"], operand, axis=_axis(stage))}


def reduce_under_other_strategy_scope(stage: Stage) -> Any:
    strategy = stage.strategy()
    operand = strategy.run(lambda: stage.array(1.0))
    with stage.strategy("mirrored").scope():
        return strategy.reduce("SUM", operand, axis=None)


def reduce_mirrored_variable(stage: Stage) -> Any:
    strategy = stage.strategy()
    with strategy.scope():
        variable = ms.Variable(stage.decode(stage.inputs["value"]))
    return {"value": strategy.reduce(stage.program["reduce_op"], variable, axis=_axis(stage))}


def reduce_in_replica_context(stage: Stage) -> Any:
    strategy, own = stage.strategy(), stage.array(1.0)
    op = stage.program["reduce_op"]
    return strategy.run(lambda: strategy.reduce(op, own, axis=_axis(stage)))


def gather_in_replica_context(stage: Stage) -> Any:
    strategy, own = stage.strategy(), stage.array([1.0])
    return strategy.run(lambda: strategy.gather(own, _axis(stage)))


def _slices(stage: Stage) -> Any:
    """The sparse operand that golden files name, but do not spell out: row 0 of two is 1."""
    return ms.IndexedSlices(stage.array([[1.0]]), stage.array([0], "int32"), (2, 1))


def gather(stage: Stage) -> Any:
    strategy = stage.strategy()
    encoded = stage.inputs["values"]
    if encoded == "indexed_slices":
        values = [_slices(stage) for _ in range(stage.n)]
    elif isinstance(encoded, list):
        values = stage.decode_all(encoded)
    else:
        raise CannotInterpret(f"values {encoded!r}")
    return {"value": strategy.gather(stage.per_replica(strategy, values), _axis(stage))}


def gather_plain(stage: Stage) -> Any:
    encoded = stage.inputs["value"]
    value = _slices(stage) if encoded == "indexed_slices" else stage.decode(encoded)
    return {"value": stage.strategy().gather(value, _axis(stage))}


def gather_nested(stage: Stage) -> Any:
    """The operand is a list that holds the per-replica value twice."""
    strategy = stage.strategy()
    value = stage.per_replica(strategy, stage.decode_all(stage.inputs["values"]))
    return {"value": strategy.gather([value, value], _axis(stage))}


HANDLERS: dict[str, Handler] = {
    "reduce": reduce,
    "reduce_nested": reduce,
    "reduce_plain": reduce_plain,
    "reduce_under_other_strategy_scope": reduce_under_other_strategy_scope,
    "reduce_mirrored_variable": reduce_mirrored_variable,
    "reduce_in_replica_context": reduce_in_replica_context,
    "gather_in_replica_context": gather_in_replica_context,
    "gather": gather,
    "gather_plain": gather_plain,
    "gather_nested": gather_nested,
}
