"""Area variables: assignments in every context, and the state they leave behind."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import mpistrat as ms
from conformance.outcomes import CannotInterpret, Failed, attempt, probe
from conformance.stage import Handler, Stage, ctx, replica_id, type_name


def create(stage: Stage, strategy: Any, init: Any) -> Any:
    """A variable of the strategy, as `program` describes it."""
    dtype = stage.program.get("dtype", "float32")
    with strategy.scope():
        return ms.Variable(
            stage.array(init, dtype),
            synchronization=ms.VariableSynchronization[stage.program["synchronization"]],
            aggregation=ms.VariableAggregation[stage.program["aggregation"]],
        )


def components(variable: Any) -> list[Any]:
    """The arrays of every copy on this rank."""
    copies = variable.values if isinstance(variable, ms.DistributedValues) else [variable]
    return [plain(copy) for copy in copies]


def plain(value: Any) -> Any:
    """The array that `value` reads as in the present context."""
    return value.read_value() if isinstance(value, ms.Variable) else value


def cross_read(strategy: Any, variable: Any) -> Any:
    def read() -> Any:
        with strategy.scope():
            return plain(variable)

    return probe(read)


def _state(stage: Stage, strategy: Any, variable: Any) -> dict[str, Any]:
    def replica_read() -> Any:
        return stage.on_replicas(strategy, lambda: plain(variable))

    return {
        "components": components(variable),
        "cross_read": cross_read(strategy, variable),
        "replica_read": probe(replica_read),
    }


def variable(stage: Stage) -> Any:
    strategy = stage.strategy()
    var = create(stage, strategy, stage.inputs["init"])
    places = _places(stage, strategy, var)
    where = stage.program["where"]
    if where not in places:
        raise CannotInterpret(f"where {where!r}")
    returned = attempt(places[where])
    state = _state(stage, strategy, var)
    if isinstance(returned, Failed):
        return Failed(returned.error, state)
    return {"returned": returned, **state}


def _places(stage: Stage, strategy: Any, var: Any) -> dict[str, Callable[[], Any]]:
    """What to do in each of the contexts a variable can be assigned in."""
    method, operands = stage.program["method"], stage.inputs["value"]
    if method not in ("assign", "assign_add", "assign_sub"):
        raise CannotInterpret(f"method {method!r}")

    def operand(value: Any) -> Any:
        if stage.program["python_scalars"]:
            return value
        return stage.array(value, stage.program["dtype"])

    def own_operand() -> Any:
        return operand(operands[replica_id()] if isinstance(operands, list) else operands)

    def assign(target: Any, value: Any) -> Any:
        return getattr(target, method)(value)

    def in_replicas() -> Any:
        return stage.on_replicas(strategy, lambda: plain(assign(var, own_operand())))

    def in_scope() -> Any:
        with strategy.scope():
            return plain(assign(var, operand(operands)))

    def per_replica_in_scope() -> None:
        values = strategy.run(own_operand)
        with strategy.scope():
            assign(var, values)

    def update(value: Any) -> None:
        with strategy.scope():
            strategy.extended.update(var, assign, args=(value,))

    def merge(_: Any, value: Any) -> None:
        total = strategy.reduce("SUM", value, axis=None)
        strategy.extended.update(var, assign, args=(total,))

    def in_merge() -> None:
        strategy.run(lambda: ctx().merge_call(merge, args=(own_operand(),)))

    return {
        "replica": in_replicas,
        "cross": in_scope,
        "toplevel": lambda: plain(assign(var, operand(operands))),
        "update": lambda: update(operand(operands)),
        "update_per_replica": lambda: update(strategy.run(own_operand)),
        "cross_per_replica": per_replica_in_scope,
        "merge": in_merge,
    }


def variable_scatter(stage: Stage) -> Any:
    strategy = stage.strategy()
    var = create(stage, strategy, stage.inputs["init"])
    by_context = _parse_slices(stage.inputs["slices"])
    method, where = stage.program["method"], stage.program["where"]

    def slices(context: str) -> Any:
        r = replica_id() if context == "replica" else 0
        rows, index = (_evaluate(text, r) for text in by_context[context])
        return ms.IndexedSlices(stage.array(rows), stage.array(index, "int32"))

    def scatter(context: str) -> None:
        getattr(var, method)(slices(context))

    def in_scope() -> None:
        with strategy.scope():
            scatter("cross")

    places: dict[str, Callable[[], Any]] = {
        "replica": lambda: strategy.run(lambda: scatter("replica")),
        "cross": in_scope,
        "toplevel": lambda: scatter("cross"),
    }
    if where not in places:
        raise CannotInterpret(f"where {where!r}")
    outcome = attempt(places[where])
    state = _state(stage, strategy, var)
    return Failed(outcome.error, state) if isinstance(outcome, Failed) else state


def _parse_slices(text: str) -> dict[str, tuple[str, str]]:
    """Such as "replica r: values [2+2r] at index [r]; cross: values [4] at index [1]"."""
    pattern = r"(replica r|cross): values (\[[^]]*\]) at index (\[[^]]*\])"
    found = {
        context.split()[0]: (rows, index) for context, rows, index in re.findall(pattern, text)
    }
    if set(found) != {"replica", "cross"}:
        raise CannotInterpret(f"slices {text!r}")
    return found


def _evaluate(text: str, r: int) -> Any:
    """A list of expressions of r, where 2r means 2 * r."""
    return eval(re.sub(r"(\d)r", r"\1*r", text), {"__builtins__": {}}, {"r": r})


def extended_update(stage: Stage) -> Any:
    if stage.program["fn"] != "v.assign_add(2)":
        raise CannotInterpret(f"fn {stage.program['fn']!r}")
    strategy = stage.strategy()
    with strategy.scope():
        var = ms.Variable(stage.array(1.0))
        result = strategy.extended.update(
            var, lambda v: v.assign_add(stage.array(2.0)), group=stage.program["group"]
        )
    return {
        "result_type": type_name(result),
        "result": result,
        "components": components(var),
    }


def extended_update_plain_variable(stage: Stage) -> Any:
    plain_variable = ms.Variable(stage.array(1.0))
    strategy = stage.strategy()
    with strategy.scope():
        return strategy.extended.update(plain_variable, lambda v: v.assign_add(stage.array(1.0)))


def variable_assign_under_other_strategy(stage: Stage) -> Any:
    with stage.strategy().scope():
        var = ms.Variable(stage.array(1.0))
    with stage.strategy().scope():
        var.assign(stage.array(2.0))


def colocate_vars_with(stage: Stage) -> Any:
    strategy = stage.strategy()
    with strategy.scope():
        var = ms.Variable(stage.array(1.0))
        with strategy.extended.colocate_vars_with(var):
            colocated = ms.Variable(stage.array(2.0))
    return {"components": components(colocated)}


def colocate_vars_with_foreign_variable(stage: Stage) -> Any:
    with stage.strategy().scope():
        foreign = ms.Variable(stage.array(1.0))
    strategy = stage.strategy()
    with strategy.scope(), strategy.extended.colocate_vars_with(foreign):
        pass


def colocate_vars_with_outside_scope(stage: Stage) -> Any:
    strategy = stage.strategy()
    with strategy.scope():
        own = ms.Variable(stage.array(1.0))
    with strategy.extended.colocate_vars_with(own):
        pass


HANDLERS: dict[str, Handler] = {
    "variable": variable,
    "variable_scatter": variable_scatter,
    "extended_update": extended_update,
    "extended_update_plain_variable": extended_update_plain_variable,
    "variable_assign_under_other_strategy": variable_assign_under_other_strategy,
    "colocate_vars_with": colocate_vars_with,
    "colocate_vars_with_foreign_variable": colocate_vars_with_foreign_variable,
    "colocate_vars_with_outside_scope": colocate_vars_with_outside_scope,
}
