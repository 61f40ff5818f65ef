"""Area contexts: who is in force where."""

from __future__ import annotations

import copy
from typing import Any

import mpistrat as ms
from conformance.outcomes import CannotInterpret, probe
from conformance.stage import Handler, Stage, ctx
from mpistrat.compat import v1


def _snapshot(current: Any = None) -> dict[str, Any]:
    context = ctx()
    return {
        "has_strategy": ms.has_strategy(),
        "in_cross_replica_context": ms.in_cross_replica_context(),
        "replica_context": context,
        "is_given": None if current is None else ms.get_strategy() is current,
        "replica_id": None if context is None else context.replica_id_in_sync_group,
        "num_replicas_in_sync": ms.get_strategy().num_replicas_in_sync,
    }


def snapshot(stage: Stage) -> Any:
    where = stage.program["where"]
    if where == "toplevel":
        return _snapshot()
    strategy = stage.strategy()
    if where == "scope":
        with strategy.scope() as entered:
            return {**_snapshot(strategy), "scope_returns_strategy": entered is strategy}
    if where == "run":
        return {"per_replica": stage.on_replicas(strategy, lambda: _snapshot(strategy))}
    if where == "merge_call":
        snapshots: list[Any] = []

        def merge(_: Any) -> None:
            snapshots.append(_snapshot(strategy))

        strategy.run(lambda: ctx().merge_call(merge))
        return {"snapshots": snapshots}
    raise CannotInterpret(f"where {where!r}")


def run_under_other_scope(stage: Stage) -> Any:
    inner = stage.strategy(stage.program["inner"])
    with stage.strategy(stage.program["outer"]).scope():
        return inner.run(lambda: stage.array(1.0))


def strategy_properties(stage: Stage) -> Any:
    strategy = stage.strategy()
    extended = strategy.extended
    return {
        "num_replicas_in_sync": strategy.num_replicas_in_sync,
        "num_worker_devices": probe(lambda: len(extended.worker_devices)),
        "num_parameter_devices": probe(lambda: len(extended.parameter_devices)),
        "cluster_resolver_is_none": strategy.cluster_resolver is None,
        "should_checkpoint": extended.should_checkpoint,
        "should_save_summary": extended.should_save_summary,
        "experimental_between_graph": probe(lambda: extended.experimental_between_graph),
        "experimental_should_init": probe(lambda: extended.experimental_should_init),
        "experimental_require_static_shapes": extended.experimental_require_static_shapes,
    }


def nested_scope_same(stage: Stage) -> Any:
    strategy = stage.strategy()
    seen: dict[str, Any] = {}
    with strategy.scope():
        with strategy.scope():
            seen["inner"] = _snapshot(strategy)
        seen["after_inner"] = _snapshot(strategy)
    seen["after"] = _snapshot(strategy)
    return seen


def nested_scope_other(stage: Stage) -> Any:
    outer, inner = (stage.strategy(stage.program[place]) for place in ("outer", "inner"))
    with outer.scope(), inner.scope():
        pass


def experimental_set_strategy(stage: Stage) -> Any:
    strategy = stage.strategy()
    ms.experimental_set_strategy(strategy)
    try:
        during = _snapshot(strategy)
    finally:
        ms.experimental_set_strategy(None)
    return {"set": during, "unset": _snapshot(strategy)}


def experimental_set_strategy_twice(stage: Stage) -> Any:
    first, second = stage.strategy(), stage.strategy()
    ms.experimental_set_strategy(first)
    try:
        ms.experimental_set_strategy(second)
        return {"second": _snapshot(second)}
    finally:
        ms.experimental_set_strategy(None)


def experimental_set_strategy_in_run(stage: Stage) -> Any:
    strategy = stage.strategy()
    strategy.run(lambda: ms.experimental_set_strategy(strategy))


def experimental_set_strategy_in_scope(stage: Stage) -> Any:
    with stage.strategy().scope():
        ms.experimental_set_strategy(stage.strategy())


def get_loss_reduction(stage: Stage) -> Any:
    if stage.program["where"] == "toplevel":
        return v1.get_loss_reduction()
    if stage.program["where"] == "scope":
        with stage.strategy().scope():
            return v1.get_loss_reduction()
    raise CannotInterpret(f"where {stage.program['where']!r}")


def construct_mirrored(stage: Stage) -> Any:
    strategy = ms.MirroredStrategy(stage.inputs["devices"])
    return {"num_replicas": strategy.num_replicas_in_sync}


def construct_default_strategy_again(stage: Stage) -> Any:
    type(stage.strategy("default"))()


def devices_after_run(stage: Stage) -> Any:
    contexts: list[Any] = []
    stage.strategy().run(lambda: contexts.append(ctx()))
    return contexts[0].devices


def construct_replica_context(stage: Stage) -> Any:
    replica_id = stage.decode(stage.inputs["replica_id"])
    return {"value": ms.ReplicaContext(stage.strategy(), replica_id)}


HANDLERS: dict[str, Handler] = {
    "snapshot": snapshot,
    "run_under_other_scope": run_under_other_scope,
    "strategy_properties": strategy_properties,
    "nested_scope_same": nested_scope_same,
    "nested_scope_other": nested_scope_other,
    "experimental_set_strategy": experimental_set_strategy,
    "experimental_set_strategy_twice": experimental_set_strategy_twice,
    "experimental_set_strategy_in_run": experimental_set_strategy_in_run,
    "experimental_set_strategy_in_scope": experimental_set_strategy_in_scope,
    "get_loss_reduction": get_loss_reduction,
    "copy.copy(strategy)": lambda stage: copy.copy(stage.strategy()),
    "copy.deepcopy(strategy)": lambda stage: copy.deepcopy(stage.strategy()),
    "construct_mirrored": construct_mirrored,
    "construct_default_strategy_again": construct_default_strategy_again,
    "replica_context.devices after run": devices_after_run,
    "construct_ReplicaContext": construct_replica_context,
}
