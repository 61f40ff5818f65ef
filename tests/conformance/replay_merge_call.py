"""Area merge_call: the meeting of a rank's replicas."""

from __future__ import annotations

import re
from typing import Any

from conformance.outcomes import CannotInterpret
from conformance.programs import merge_programs
from conformance.stage import Handler, Stage, ctx, replica_id


def _program(stage: Stage) -> Any:
    programs = merge_programs(stage)
    name = stage.program["merge"]
    if name not in programs:
        raise CannotInterpret(f"merge {name!r}")
    return programs[name]


def merge_call(stage: Stage) -> Any:
    merge, operand = _program(stage)
    calls: list[Any] = []

    def counted(strategy: Any, value: Any) -> Any:
        calls.append(value)
        return merge(strategy, value)

    results = stage.on_replicas(
        stage.strategy(), lambda: ctx().merge_call(counted, args=(operand(),))
    )
    return {"per_replica": _as_recorded(stage, results), "merge_fn_calls": len(calls)}


def _as_recorded(stage: Stage, results: list[Any]) -> list[Any]:
    """One entry stands for all replicas where they returned the same object, which `run` unwraps."""
    recorded = stage.case["expect"].get("per_replica")
    if recorded is not None and len(recorded) == 1:
        alike = all(result is results[0] for result in results)
        return results[:1] if alike else results
    return results


def _initial(stage: Stage) -> Any:
    if stage.program["init"] != "1+replica":
        raise CannotInterpret(f"init {stage.program['init']!r}")
    return stage.array(1 + replica_id())


def merge_call_sequence(stage: Stage) -> Any:
    merge, _ = _program(stage)

    def program() -> Any:
        value = _initial(stage)
        for _ in range(stage.program["times"]):
            value = ctx().merge_call(merge, args=(value,))
        return value

    return {"per_replica": stage.on_replicas(stage.strategy(), program)}


def all_reduce_sequence(stage: Stage) -> Any:
    def program() -> Any:
        value = _initial(stage)
        for _ in range(stage.program["times"]):
            value = ctx().all_reduce("SUM", value)
        return value

    return {"per_replica": stage.on_replicas(stage.strategy(), program)}


def merge_call_unbalanced(stage: Stage) -> Any:
    who = stage.program["who"]

    def times() -> int:
        if only := re.fullmatch(r"replica (\d+) only", who):
            return int(replica_id() == int(only[1]))
        if who == "replica r calls r+1 times":
            return replica_id() + 1
        raise CannotInterpret(f"who {who!r}")

    def program() -> None:
        for _ in range(times()):
            ctx().merge_call(lambda strategy: None)

    stage.strategy().run(program)


def merge_call_closure_of_replica_id(stage: Stage) -> Any:
    ran: list[int] = []

    def program() -> Any:
        mine = replica_id()

        def merge(_: Any) -> int:
            ran.append(mine)
            return mine

        return ctx().merge_call(merge)

    results = stage.on_replicas(stage.strategy(), program)
    return {"per_replica": _as_recorded(stage, results), "merge_fn_from_replica": ran}


def merge_call_execution_order(stage: Stage) -> Any:
    order: list[tuple[str, int]] = []

    def program() -> None:
        order.append(("a", replica_id()))
        ctx().merge_call(lambda strategy: order.append(("merge", -1)))
        order.append(("b", replica_id()))

    stage.strategy().run(program)
    return {"order": order}


def merge_call_toplevel_default(stage: Stage) -> Any:
    context = ctx()
    assert context is not None
    value = context.merge_call(lambda strategy, operand: operand, args=(3,))
    return {"value": value, "default_ctx": context}


def merge_call_inside_nested_function(stage: Stage) -> Any:
    def nested() -> Any:
        return ctx().merge_call(
            lambda strategy, value: strategy.reduce("SUM", value, axis=None),
            args=(stage.array(1 + replica_id()),),
        )

    return {"per_replica": stage.on_replicas(stage.strategy(), nested)}


def merge_call_after_run(stage: Stage) -> Any:
    contexts: list[Any] = []
    stage.strategy().run(lambda: contexts.append(ctx()))
    return contexts[0].merge_call(lambda strategy: 1)


HANDLERS: dict[str, Handler] = {
    "merge_call": merge_call,
    "merge_call_sequence": merge_call_sequence,
    "all_reduce_sequence": all_reduce_sequence,
    "merge_call_unbalanced": merge_call_unbalanced,
    "merge_call_closure_of_replica_id": merge_call_closure_of_replica_id,
    "merge_call_execution_order": merge_call_execution_order,
    "merge_call_toplevel_default": merge_call_toplevel_default,
    "merge_call_on_saved_context_after_run": merge_call_after_run,
    "merge_call_inside_nested_tf_function": merge_call_inside_nested_function,
}
