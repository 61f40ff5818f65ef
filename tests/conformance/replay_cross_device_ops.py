"""Area cross_device_ops: the policies by themselves, their packing, and their options."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

import mpistrat as ms
from conformance.outcomes import CannotInterpret
from conformance.stage import Handler, Stage, described, device
from mpistrat.cross_device_ops import packing


def _policy(stage: Stage) -> Any:
    if stage.size > 1:
        # The recorded policies act inside a rank; this one does their work over all ranks.
        return ms.MpiAllReduce(stage.strategy("mirrored").extended.communicator)
    options: dict[str, Any] = {}
    if "num_packs" in stage.program:
        options["num_packs"] = stage.program["num_packs"]
    if "accumulation_fn" in stage.program:
        options["accumulation_fn"] = _accumulation(stage.program["accumulation_fn"])
    return _class(stage.program["class"])(**options)


def _class(name: str) -> Any:
    if name not in _CLASSES:
        raise CannotInterpret(f"class {name!r}")
    return getattr(ms, name)


_CLASSES = ("CrossDeviceOps", "ReductionToOneDevice", "HierarchicalCopyAllReduce", "NcclAllReduce")


def _accumulation(name: str) -> Callable[[Sequence[Any]], Any]:
    if name != "elementwise max":
        raise CannotInterpret(f"accumulation_fn {name!r}")

    def largest(values: Sequence[Any]) -> Any:
        result = values[0]
        for value in values[1:]:
            maximum = torch.maximum if isinstance(value, torch.Tensor) else np.maximum
            result = maximum(result, value)
        return result

    return largest


def _destinations(name: str, operand: Any, i: int = 0) -> Any:
    if name == "same":
        return operand
    if name.startswith("dev"):
        return device(int(name.removeprefix("dev")))
    if name == "per-replica of n":
        return operand
    if name == "i-th value to device i%2":
        return device(i % 2)
    bad = {"none": None, "empty_str": "", "int": 5, "list": [device(0)], "empty_list": []}
    if name in bad:
        return bad[name]
    raise CannotInterpret(f"destinations {name!r}")


def _operand(stage: Stage, encoded: list[Any] | None) -> Any:
    """The components of this rank; where none are recorded, a 1 each."""
    if encoded is None:
        return ms.PerReplica([stage.array(1.0) for _ in stage.replicas])
    return ms.PerReplica([stage.decode(encoded[replica]) for replica in stage.replicas])


def _reduce_op(program: dict[str, Any]) -> Any:
    """A ReduceOp by its name, or what was given in the place of one."""
    raw = program.get("reduce_op_raw")
    if raw is None:
        return ms.ReduceOp[program["reduce_op"]]
    kind, _, name = raw.rpartition(".")
    if kind == "VariableAggregation":
        return ms.VariableAggregation[name]
    if kind == "ReduceOp":
        return ms.ReduceOp[name]
    return raw


def cdo_reduce(stage: Stage) -> Any:
    operand = _operand(stage, stage.inputs.get("values"))
    where = _destinations(stage.program["destinations"], operand)
    return described(_policy(stage).reduce(_reduce_op(stage.program), operand, where))


def cdo_reduce_plain(stage: Stage) -> Any:
    """An array that is no per-replica value."""
    value = stage.decode(stage.inputs["value"])
    where = _destinations(stage.program["destinations"], value)
    op = ms.ReduceOp[stage.program.get("reduce_op", "SUM")]
    return described(_policy(stage).reduce(op, value, where))


def cdo_batch_reduce(stage: Stage) -> Any:
    encoded = stage.inputs.get("values", [None])
    operands = [_operand(stage, values) for values in encoded]
    name = stage.program.get("destinations", "same")
    pairs = [(operand, _destinations(name, operand, i)) for i, operand in enumerate(operands)]
    op = ms.ReduceOp[stage.program["reduce_op"]]
    return {"results": [described(r) for r in _policy(stage).batch_reduce(op, pairs)]}


def cdo_batch_reduce_bad(stage: Stage) -> Any:
    pairs = ast.literal_eval(stage.inputs["pairs"])
    return _policy(stage).batch_reduce(ms.ReduceOp.SUM, pairs)


def cdo_broadcast(stage: Stage) -> Any:
    encoded = stage.inputs.get("value")
    value = stage.array(1.0) if encoded is None else stage.decode(encoded)
    where = _destinations(stage.program["destinations"], _operand(stage, None))
    return described(_policy(stage).broadcast(value, where))


def cdo_construct(stage: Stage) -> Any:
    num_packs = stage.inputs["num_packs"]
    return {"value": _class(stage.program["class"])(num_packs=num_packs).num_packs}


def concat_and_split_pack(stage: Stage) -> Any:
    values = [stage.array(np.zeros(size)) for size in stage.inputs["sizes"]]
    packs = packing.concat_and_split(values, stage.inputs["num_packs"])
    return {"pack_sizes": [int(pack.shape[0]) for pack in packs]}


def group_by_size(stage: Stage) -> Any:
    dtype = stage.program["dtype"]
    values = [stage.array(np.zeros(size), dtype) for size in stage.inputs["num_elements"]]
    groups = packing.group_by_size(values, stage.inputs["bytes_per_pack"])
    return {"packs": [[int(value.shape[0]) for value in group] for group in groups]}


def from_variable_aggregation(stage: Stage) -> Any:
    aggregation = ms.VariableAggregation[stage.inputs["aggregation"]]
    return {"value": ms.ReduceOp.from_variable_aggregation(aggregation)}


def _fields(options: Any) -> dict[str, Any]:
    names = ("bytes_per_pack", "timeout_seconds", "implementation")
    return {name: getattr(options, name) for name in names}


def communication_options(stage: Stage) -> Any:
    return _fields(ms.CommunicationOptions(**stage.inputs))


def communication_options_merge(stage: Stage) -> Any:
    left = ms.CommunicationOptions(**stage.inputs["left"])
    right = stage.inputs["right"]
    return _fields(left.merge(None if right is None else ms.CommunicationOptions(**right)))


def collective_hints(stage: Stage) -> Any:
    return _fields(ms.experimental.CollectiveHints(**stage.inputs))


def reduce_ops(stage: Stage) -> Any:
    return {"value": sorted(member.name for member in ms.ReduceOp)}


def communication_implementation(stage: Stage) -> Any:
    return {"value": sorted(member.name for member in ms.CommunicationImplementation)}


HANDLERS: dict[str, Handler] = {
    "cdo_reduce": cdo_reduce,
    "cdo_reduce_plain": cdo_reduce_plain,
    "cdo_batch_reduce": cdo_batch_reduce,
    "cdo_batch_reduce_bad": cdo_batch_reduce_bad,
    "cdo_broadcast": cdo_broadcast,
    "cdo_construct": cdo_construct,
    "concat_and_split_pack": concat_and_split_pack,
    "group_by_size": group_by_size,
    "ReduceOp": reduce_ops,
    "ReduceOp.from_variable_aggregation": from_variable_aggregation,
    "CommunicationOptions": communication_options,
    "CommunicationOptions.merge": communication_options_merge,
    "CollectiveHints": collective_hints,
    "CommunicationImplementation": communication_implementation,
}
