"""Areas partitioners and sharded_variable: how variables are split, and what the whole of the shards does."""

from __future__ import annotations

from typing import Any

import numpy as np

import mpistrat as ms
from conformance.outcomes import CannotInterpret, attempt
from conformance.stage import Handler, Stage
from mpistrat.experimental import partitioners

_OTHER_INDICES: dict[str, Any] = {
    "2d_int_int": (2, 1),
    "2d_slice_col": (slice(1, 4), 0),
    "ellipsis": (..., 1),
    "newaxis": None,
    "step0": slice(None, None, 0),
    "bool_mask": [True, False, True, False, False],
}


def partitioner(stage: Stage) -> Any:
    made = getattr(partitioners, stage.program["class"])(**stage.program.get("kwargs") or {})
    axis = stage.program.get("axis")
    arguments = {} if axis is None else {"axis": axis}
    shape = stage.inputs.get("shape", [4])
    return {"partitions": made(shape, stage.inputs.get("dtype", "float32"), **arguments)}


def _sharded(stage: Stage) -> ms.ShardedVariable:
    lengths = stage.inputs.get("shard_lengths", [2, 2, 1])
    tail = stage.inputs.get("tail", [])
    rows, values = sum(lengths), stage.inputs.get("values", "arange")
    if values != "arange":
        raise CannotInterpret(f"values {values!r}")
    whole = np.arange(rows * int(np.prod(tail)), dtype="float32").reshape([rows, *tail])
    parts = np.split(whole, np.cumsum(lengths)[:-1])
    return ms.ShardedVariable([ms.Variable(stage.array(part)) for part in parts])


def getitem(stage: Stage) -> Any:
    return {"value": _sharded(stage)[_key(stage)]}


def _key(stage: Stage) -> Any:
    if "slice" in stage.program:
        text = stage.program["slice"]
        bounds = [] if text == "all" else text.split(":")
        return (
            slice(*[int(bound) if bound else None for bound in bounds]) if bounds else slice(None)
        )
    index = stage.program["index"]
    if isinstance(index, int):
        return index
    if index in ("tensor_index", "tensor_slice"):
        number = stage.array(1, "int64")
        return number if index == "tensor_index" else slice(number, None)
    if index not in _OTHER_INDICES:
        raise CannotInterpret(f"index {index!r}")
    return _OTHER_INDICES[index]


def assign(stage: Stage) -> Any:
    sharded = _sharded(stage)
    method = getattr(sharded, stage.program["op"].removeprefix("sharded_"))
    returned = method(stage.array(stage.inputs["operand"]))
    return {
        "components": _components(sharded),
        "returns_self": returned is sharded,
        "shape": list(sharded.shape),
    }


def _components(sharded: ms.ShardedVariable) -> list[Any]:
    return [variable.read_value() for variable in sharded.variables]


def scatter(stage: Stage) -> Any:
    sharded = _sharded(stage)
    method = getattr(sharded, stage.program["op"].removeprefix("sharded_"))
    if stage.inputs.get("indices_rank") == 2:
        indices, updates = [[0, 1]], [[1.0, 2.0]]
    else:
        indices, updates = stage.inputs["indices"], stage.inputs["updates"]
    method(ms.IndexedSlices(stage.array(updates), stage.array(indices, "int64")))
    return {"components": _components(sharded)}


def sparse_read(stage: Stage) -> Any:
    indices = stage.array(stage.inputs["indices"], "int64")
    return {"value": _sharded(stage).sparse_read(indices)}


def arithmetic(stage: Stage) -> Any:
    if stage.program["fn"] != "s*2+1":
        raise CannotInterpret(f"fn {stage.program['fn']!r}")
    sharded = _sharded(stage)
    return {
        "value": sharded * 2 + 1,
        "convert": np.asarray(sharded),
        "numpy": sharded.numpy(),
    }


def construct(stage: Stage) -> Any:
    def variable(value: Any, dtype: str = "float32") -> Any:
        return ms.Variable(stage.array(value, dtype))

    makers: dict[str, Any] = {
        "numpy": lambda: [np.zeros(2)],
        "float32+int32": lambda: [variable([1.0]), variable([1], "int32")],
        "[1,2]+[1,3]": lambda: [variable([[1, 2]]), variable([[1, 2, 3]])],
        "scalar": lambda: [variable(1.0)],
    }
    kind = stage.inputs["variables"]
    if kind not in makers:
        raise CannotInterpret(f"variables {kind!r}")
    return ms.ShardedVariable(makers[kind]())


def iteration(stage: Stage) -> Any:
    sharded = _sharded(stage)
    return {
        "n": len(list(sharded)),
        "name": sharded.name,
        "len": attempt(lambda: len(sharded)),  # type: ignore[arg-type]
    }


PARTITIONERS: dict[str, Handler] = {
    "partitioner": partitioner,
}
HANDLERS: dict[str, Handler] = {
    "sharded_getitem": getitem,
    "sharded_sparse_read": sparse_read,
    "sharded_arith": arithmetic,
    "sharded_ctor": construct,
    "sharded_iter": iteration,
    **dict.fromkeys(("sharded_assign", "sharded_assign_add", "sharded_assign_sub"), assign),
    **dict.fromkeys(
        (
            f"sharded_scatter_{combine}"
            for combine in ("add", "sub", "mul", "div", "min", "max", "update")
        ),
        scatter,
    ),
}
