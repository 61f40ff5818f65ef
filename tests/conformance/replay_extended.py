"""Area extended: reductions to destinations, and what else StrategyExtended offers."""

from __future__ import annotations

import types
from typing import Any

import mpistrat as ms
from conformance.outcomes import CannotInterpret
from conformance.replay_variables import components
from conformance.stage import Handler, Stage, described, device, replica_id, type_name


def _destinations(stage: Stage, strategy: Any, operand: Any) -> Any:
    name = stage.program["destinations"]
    if name == "per_replica":
        return operand
    if name.startswith("device"):
        return device(int(name.removeprefix("device")))
    if name == "variable":
        with strategy.scope():
            return ms.Variable(stage.array([0.0, 0.0]))
    if name == "none":
        return None
    raise CannotInterpret(f"destinations {name!r}")


def _operand(stage: Stage, strategy: Any) -> Any:
    return stage.per_replica(strategy, stage.decode_all(stage.inputs["values"]))


def reduce_to(stage: Stage) -> Any:
    strategy = stage.strategy()
    operand = _operand(stage, strategy)
    where = _destinations(stage, strategy, operand)
    return described(strategy.extended.reduce_to(stage.program["reduce_op"], operand, where))


def batch_reduce_to(stage: Stage) -> Any:
    """The same value twice."""
    strategy = stage.strategy()
    operand = _operand(stage, strategy)
    pair = (operand, _destinations(stage, strategy, operand))
    results = strategy.extended.batch_reduce_to(stage.program["reduce_op"], [pair, pair])
    return {"results": [described(result) for result in results]}


def broadcast_to(stage: Stage) -> Any:
    strategy = stage.strategy()
    value = stage.decode(stage.inputs["value"])
    template = strategy.run(lambda: stage.array(0.0))
    result = strategy.extended.broadcast_to(value, _destinations(stage, strategy, template))
    if isinstance(result, ms.DistributedValues):
        return described(result)
    return {"type": type_name(result), "value": result}


def reduce_to_bad(stage: Stage) -> Any:
    strategy = stage.strategy()
    operand = strategy.run(lambda: stage.array(1.0))
    bad: dict[str, tuple[Any, Any]] = {
        "list_destinations": ("SUM", [device(0)]),
        "tuple_destinations": ("SUM", (device(0),)),
        "variable_aggregation": (ms.VariableAggregation.SUM, operand),
        "string_max": ("max", operand),
    }
    how = stage.program["how"]
    if how == "in_replica":
        own = stage.array(1.0)
        return strategy.run(lambda: strategy.extended.reduce_to("SUM", own, own))
    if how not in bad:
        raise CannotInterpret(f"how {how!r}")
    return strategy.extended.reduce_to(bad[how][0], operand, bad[how][1])


def update_call_count(stage: Stage) -> Any:
    strategy = stage.strategy()
    contexts: list[int] = []

    def update(variable: Any) -> None:
        contexts.append(int(ms.in_cross_replica_context()))

    with strategy.scope():
        strategy.extended.update(ms.Variable(stage.array(1.0)), update)
    return {"calls": len(contexts), "in_cross_ctx_each": contexts}


def update_inside_run(stage: Stage) -> Any:
    if stage.program["fn"] != "v.assign_add(1+replica_id)":
        raise CannotInterpret(f"fn {stage.program['fn']!r}")
    strategy = stage.strategy()
    with strategy.scope():
        variable = ms.Variable(stage.array(1.0))

    def program() -> None:
        own = stage.array(1.0 + replica_id())
        strategy.extended.update(variable, lambda v, x: v.assign_add(x), args=(own,))

    strategy.run(program)
    return {"components": components(variable)}


def update_non_slot(stage: Stage) -> Any:
    if stage.program["fn"] != "x*2":
        raise CannotInterpret(f"fn {stage.program['fn']!r}")
    how = stage.program["how"]
    if how not in ("colocated_tuple_devices", "single_device", "group_true", "group_false"):
        raise CannotInterpret(f"how {how!r}")
    strategy = stage.strategy()
    extended = strategy.extended
    operand = stage.per_replica(strategy, [stage.array(v) for v in stage.inputs["values"]])
    devices: Any = tuple(extended.worker_devices)
    devices = devices[0] if how == "single_device" else devices
    result = extended.update_non_slot(
        devices, lambda x: x * 2, args=(operand,), group=how != "group_false"
    )
    parts = result if isinstance(result, tuple) else strategy.experimental_local_results(result)
    return {"type": type_name(result), "value": parts}


def read_var(stage: Stage) -> Any:
    strategy = stage.strategy()
    with strategy.scope():
        variable = ms.Variable(stage.array(stage.inputs["init"]))
    extended = strategy.extended
    return {
        "read_var": extended.read_var(variable),
        "value_container_is_self": extended.value_container(variable) is variable,
    }


def group(stage: Stage) -> Any:
    strategy = stage.v1_strategy()
    grouped = strategy.group(strategy.run(lambda: stage.array(1.0)))
    return {"is_none_or_op": grouped is None}


def update_config_proto(stage: Stage) -> Any:
    """Any object with the option's attribute stands for TensorFlow's ConfigProto."""
    config = types.SimpleNamespace(isolate_session_state=False)
    updated = stage.v1_strategy().update_config_proto(config)
    return {
        "is_copy": updated is not config,
        "isolate_session_state": updated.isolate_session_state,
    }


HANDLERS: dict[str, Handler] = {
    "reduce_to": reduce_to,
    "batch_reduce_to": batch_reduce_to,
    "broadcast_to": broadcast_to,
    "reduce_to_bad": reduce_to_bad,
    "update_non_slot": update_non_slot,
    "update_call_count": update_call_count,
    "extended.update called inside run": update_inside_run,
    "read_var": read_var,
    "group": group,
    "update_config_proto": update_config_proto,
}
