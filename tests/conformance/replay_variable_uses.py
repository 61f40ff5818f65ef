"""Area variables: how variables are made, used as arrays, saved and restored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import mpistrat as ms
from conformance.outcomes import CannotInterpret, probe
from conformance.replay_variables import components, create, cross_read, plain
from conformance.stage import Handler, Stage, replica_id


def variable_create(stage: Stage) -> Any:
    strategy = stage.strategy()
    var = create(stage, strategy, stage.inputs["init"])
    return {
        "components": components(var),
        "synchronization": var.synchronization,
        "aggregation": var.aggregation,
        "trainable": var.trainable,
        "created_in_scope": strategy.extended.variable_created_in_scope(var),
        "names": len({copy.name for copy in var.values}),
    }


def variable_create_on_read_trainable(stage: Stage) -> Any:
    with stage.strategy().scope():
        var = ms.Variable(
            stage.array(1.0),
            trainable=True,
            synchronization=ms.VariableSynchronization.ON_READ,
            aggregation=ms.VariableAggregation.SUM,
        )
    return {"value": "ok", "trainable": var.trainable}


def variable_create_on_read(stage: Stage) -> Any:
    with stage.strategy().scope():
        var = ms.Variable(
            stage.array(1.0),
            synchronization=ms.VariableSynchronization.ON_READ,
            aggregation=ms.VariableAggregation.SUM,
        )
    return {"trainable": var.trainable}


def variable_create_callable_initializer(stage: Stage) -> Any:
    calls: list[int] = []

    def initializer() -> Any:
        calls.append(1)
        return stage.array(float(len(calls)))

    with stage.strategy().scope():
        var = ms.Variable(initializer)
    return {"components": components(var), "initializer_calls": len(calls)}


def variable_create_in_replica_fn(stage: Stage) -> Any:
    """The initial value is 1 + replica id."""
    strategy = stage.strategy()
    made = stage.on_replicas(strategy, lambda: ms.Variable(stage.array(1.0 + replica_id())))
    return {
        "per_replica": stage.on_replicas(strategy, lambda: plain(made[0])),
        "same_object": all(var is made[0] for var in made),
        "type": type(made[0]).__name__,
    }


def variable_read_under_other_strategy_run(stage: Stage) -> Any:
    with stage.strategy().scope():
        var = ms.Variable(stage.array(1.0))
    return stage.strategy().run(var.read_value)


def variable_created_outside_scope(stage: Stage) -> Any:
    var = ms.Variable(stage.array(5.0))
    strategy = stage.strategy()

    def program() -> Any:
        var.assign_add(stage.array(1.0))
        return var

    return {
        "created_in_scope": strategy.extended.variable_created_in_scope(var),
        "per_replica": stage.on_replicas(strategy, program),
        "after": plain(var),
    }


def variable_use(stage: Stage) -> Any:
    """Variables that are synchronised on reading first get +1 on every replica."""
    strategy = stage.strategy()
    var = create(stage, strategy, stage.inputs["init"])
    if stage.program["synchronization"] == "ON_READ":
        ones = np.ones_like(stage.inputs["init"])

        def add_one() -> None:
            var.assign_add(stage.array(ones))

        strategy.run(add_one)
    uses: dict[str, Callable[[], Any]] = {
        "add": lambda: var + 1.0,
        "radd": lambda: 1.0 + var,
        "sub": lambda: var - 1.0,
        "rsub": lambda: 1.0 - var,
        "mul": lambda: var * 2.0,
        "rmul": lambda: 2.0 * var,
        "div": lambda: var / 2.0,
        "truediv": lambda: var / 2.0,
        "pow": lambda: var**2.0,
        "neg": lambda: -var,
        "abs": lambda: abs(var),
        "getitem": lambda: var[0],
        "convert": lambda: np.asarray(var),
        "value": lambda: var.value(),
        "read_value": lambda: var.read_value(),
        "numpy": lambda: var.numpy(),
    }
    how = stage.program["how"]
    if how not in uses:
        raise CannotInterpret(f"how {how!r}")

    def in_scope() -> Any:
        with strategy.scope():
            return uses[how]()

    return {
        "cross": probe(in_scope),
        "replica": probe(lambda: stage.on_replicas(strategy, uses[how])),
    }


def variable_checkpoint(stage: Stage) -> Any:
    """Give the copies the recorded values, save, set them to zero, and restore what rank 0 saved."""
    strategy = stage.strategy()
    values = [stage.array(value) for value in stage.inputs["components"]]
    var = create(stage, strategy, np.zeros_like(stage.inputs["components"][0]))
    zeros = stage.array(np.zeros_like(stage.inputs["components"][0]))

    def update(value: Any) -> None:
        with strategy.scope():
            strategy.extended.update(var, lambda v, x: v.assign(x), args=(value,))

    update(stage.per_replica(strategy, values))
    saved = strategy.extended.communicator.broadcast_object(var.state())
    update(zeros)
    var.load_state(saved)
    return {
        "saved": saved,
        "restored_components": components(var),
        "restored_cross_read": cross_read(strategy, var),
    }


HANDLERS: dict[str, Handler] = {
    "variable_create": variable_create,
    "variable_create_on_read_trainable": variable_create_on_read_trainable,
    "variable_create_on_read_trainable_unset": variable_create_on_read,
    "variable_create_callable_initializer": variable_create_callable_initializer,
    "variable_create_in_replica_fn": variable_create_in_replica_fn,
    "variable_read_under_other_strategy_run": variable_read_under_other_strategy_run,
    "variable_created_outside_scope_then_assign_add_1_in_run": variable_created_outside_scope,
    "variable_use": variable_use,
    "variable_checkpoint": variable_checkpoint,
}
