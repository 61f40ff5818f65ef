"""Area multi_worker: a worker is a rank. Each rank returns what its worker recorded."""

from __future__ import annotations

import re
from typing import Any

from conformance.outcomes import CannotInterpret, Failed, attempt
from conformance.programs import merge_programs
from conformance.replay_variables import components, create, cross_read
from conformance.stage import Handler, Stage, ctx, replica_id


def reduce(stage: Stage) -> Any:
    strategy = stage.strategy()
    axis = stage.program["axis"]
    operand = stage.per_replica(strategy, stage.decode_all(stage.inputs["values"]))
    axis = tuple(axis) if isinstance(axis, list) else axis
    return {"value": strategy.reduce(stage.program["reduce_op"], operand, axis=axis)}


def reduce_plain(stage: Stage) -> Any:
    """Worker w passes a plain 1 + w."""
    operand = stage.array(1.0 + stage.rank)
    strategy = stage.strategy()
    op, axis = stage.program["reduce_op"], stage.program["axis"]
    return {"value": strategy.reduce(op, operand, axis=axis)}


def all_reduce(stage: Stage) -> Any:
    values = stage.decode_all(stage.inputs["values"])

    def program() -> Any:
        return ctx().all_reduce(stage.program["reduce_op"], values[replica_id()])

    return {"local": stage.on_replicas(stage.strategy(), program)}


def gather(stage: Stage) -> Any:
    strategy = stage.strategy()
    operand = stage.per_replica(strategy, stage.decode_all(stage.inputs["values"]))
    return {"value": strategy.gather(operand, stage.program["axis"])}


def all_gather(stage: Stage) -> Any:
    values = stage.decode_all(stage.inputs["values"])

    def program() -> Any:
        return ctx().all_gather(values[replica_id()], axis=stage.program["axis"])

    return {"local": stage.on_replicas(stage.strategy(), program)}


def merge_call(stage: Stage) -> Any:
    programs = merge_programs(stage)
    if stage.program["merge"] not in programs:
        raise CannotInterpret(f"merge {stage.program['merge']!r}")
    merge, operand = programs[stage.program["merge"]]

    def program() -> Any:
        return ctx().merge_call(merge, args=(operand(),))

    return {"local": stage.on_replicas(stage.strategy(), program)}


def variable(stage: Stage) -> Any:
    """`method` is a call such as "assign_add(1+global replica)"."""
    match = re.fullmatch(r"(assign|assign_add|assign_sub)\((.+)\)", stage.program["method"])
    if match is None:
        raise CannotInterpret(f"method {stage.program['method']!r}")
    method, expression = match[1], match[2].replace("global replica", "rid")
    strategy = stage.strategy()
    var = create(stage, strategy, stage.inputs["init"])

    def assign(rid: int | None) -> None:
        value = eval(expression, {"__builtins__": {}}, {"rid": rid})
        getattr(var, method)(stage.array(float(value)))

    def in_scope() -> None:
        with strategy.scope():
            assign(None)

    if stage.program["where"] == "replica":
        outcome = attempt(lambda: strategy.run(lambda: assign(replica_id())))
    elif stage.program["where"] == "cross":
        outcome = attempt(in_scope)
    else:
        raise CannotInterpret(f"where {stage.program['where']!r}")
    state = {"components": components(var), "cross_read": cross_read(strategy, var)}
    if isinstance(outcome, Failed):
        return Failed(outcome.error, state)
    return {"ok": outcome, **state}


def mw_properties(stage: Stage) -> Any:
    strategy = stage.strategy()
    extended, resolver = strategy.extended, strategy.cluster_resolver
    contexts = strategy.experimental_distribute_values_from_function(
        lambda context: [context.replica_id_in_sync_group, context.num_replicas_in_sync]
    )
    return {
        "num_replicas_in_sync": strategy.num_replicas_in_sync,
        "num_worker_devices": len(extended.worker_devices),
        "should_checkpoint": extended.should_checkpoint,
        "should_save_summary": extended.should_save_summary,
        "between_graph": extended.experimental_between_graph,
        "should_init": extended.experimental_should_init,
        "task": [resolver.task_type, resolver.task_id],
        "in_multi_worker_mode": extended.communicator.size > 1,
        "replica_ids": stage.on_replicas(strategy, lambda: ctx().replica_id_in_sync_group),
        "value_contexts": strategy.experimental_local_results(contexts),
    }


HANDLERS: dict[str, Handler] = {
    "reduce": reduce,
    "reduce_plain": reduce_plain,
    "all_reduce": all_reduce,
    "gather": gather,
    "all_gather": all_gather,
    "merge_call": merge_call,
    "variable": variable,
    "mw_properties": mw_properties,
}
