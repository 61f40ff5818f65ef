"""Area run: what a replica's function is given, and how results are regrouped and taken apart."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

import mpistrat as ms
from conformance.outcomes import CannotInterpret
from conformance.programs import run_programs
from conformance.stage import Handler, Stage, replica_id, type_name


def run(stage: Stage) -> Any:
    programs = run_programs(stage)
    name = stage.program["fn"]
    if name not in programs:
        raise CannotInterpret(f"fn {name!r}")
    strategy = stage.strategy()
    result = strategy.run(programs[name])
    return {"result": result, "local_results": strategy.experimental_local_results(result)}


def run_args(stage: Stage) -> Any:
    """`fn` is an expression of the positional arguments a, b, … (all: `args`) and the named ones."""
    strategy = stage.strategy()
    args, kwargs = _arguments(stage, strategy)

    def program(*positional: Any, **named: Any) -> Any:
        by_letter = dict(zip("abcdefgh", positional, strict=False))
        names = {"args": positional, **by_letter, **named, "len": len, "type": type}
        return eval(stage.program["fn"], {"__builtins__": {}}, names)  # recorded, not foreign

    result = strategy.run(program, args=args, kwargs=kwargs)
    return {"local_results": strategy.experimental_local_results(result)}


def _arguments(stage: Stage, strategy: Any) -> tuple[Any, Any]:
    if "args_type" not in stage.program:

        def made(spec: Any) -> Any:
            if isinstance(spec, dict):
                return {name: made(inner) for name, inner in spec.items()}
            return _argument(stage, strategy, spec)

        args = tuple(made(spec) for spec in stage.program["args"])
        return args, {name: made(spec) for name, spec in stage.program["kwargs"].items()}
    two = [stage.array(1.0), stage.array(2.0)]
    kinds: dict[str, Any] = {
        "list": two,
        "tuple": tuple(two),
        "none": None,
        "nonetype": None,
        "str": "ab",
        "string": "ab",
        "tensor": stage.array([1.0, 2.0]),
        "eagertensor": stage.array([1.0, 2.0]),
        "dict": {"a": two[0]},
        "int": 5,
        "set": {1, 2},
    }
    name = stage.program["args_type"].lower()
    if name not in kinds:
        raise CannotInterpret(f"args_type {name!r}")
    return kinds[name], None


def _argument(stage: Stage, strategy: Any, spec: str) -> Any:
    """Such as "per_replica 10*(r+1)" or "plain 1.0"."""
    match = re.fullmatch(r"(per_replica|plain) (.+)", spec)
    if match is None:
        raise CannotInterpret(f"argument {spec!r}")
    kind, expression = match.groups()
    if kind == "plain":
        return stage.array(eval(expression, {"__builtins__": {}}, {}))
    values = [stage.array(eval(expression, {"__builtins__": {}}, {"r": r})) for r in range(stage.n)]
    return stage.per_replica(strategy, values)


def local_results_plain(stage: Stage) -> Any:
    strategy = stage.strategy()
    value = stage.decode(stage.inputs["value"])
    return {
        "local_results": strategy.experimental_local_results(value),
        "unwrap": stage.v1_strategy().unwrap(value),
    }


def local_results_distributed(stage: Stage) -> Any:
    strategy = stage.strategy()
    value = strategy.experimental_distribute_values_from_function(
        lambda context: context.replica_id_in_sync_group
    )
    return {
        "type": type_name(value),
        "local_results": strategy.experimental_local_results(value),
        "nested": strategy.experimental_local_results({"a": [value, 5]}),
    }


def distribute_values_from_function(stage: Stage) -> Any:
    def all_kinds(context: Any) -> Any:
        replica, n = context.replica_id_in_sync_group, context.num_replicas_in_sync
        return {"id": replica, "n": n, "same": "s", "t": (2 * replica,)}

    functions: dict[str, Callable[[Any], Any]] = {
        "{id, n, same:'s', t:(2*id,)}": all_kinds,
        "int": lambda context: context.replica_id_in_sync_group,
        "same_int": lambda context: 5,
        "none": lambda context: None,
    }
    name = stage.program["fn"]
    if name not in functions:
        raise CannotInterpret(f"fn {name!r}")
    strategy = stage.strategy()
    return {"value": strategy.experimental_distribute_values_from_function(functions[name])}


def value_context_str(stage: Stage) -> Any:
    return str(ms.ValueContext(stage.program["replica_id"], stage.program["num"]))


def per_replica_misuse(stage: Stage) -> Any:
    value = stage.strategy().run(lambda: stage.array(1.0))
    uses: dict[str, Callable[[], Any]] = {
        "convert": lambda: np.asarray(value),
        "float": lambda: float(value),
        "int": lambda: int(value),
        "index": lambda: value[0],
        "add": lambda: value + 1.0,
        "radd": lambda: 1.0 + value,
        "mul": lambda: value * 2.0,
        "neg": lambda: -value,
        "iter": lambda: list(iter(value)),
        "len": lambda: len(value),
        "values_attr": lambda: value.values,
        "str_ok": lambda: isinstance(str(value), str) and len(str(value)) > 0,
        "tfadd": lambda: stage.function("add")(value, stage.array(1.0)),
    }
    how = stage.program["how"]
    if how not in uses:
        raise CannotInterpret(f"how {how!r}")
    return {"value": uses[how]()}


def per_replica_captured(stage: Stage) -> Any:
    """`value` is 1.0 on the first replica, 2.0 on the second; each converts it to an array, and adds that to itself."""
    strategy = stage.strategy()
    value = strategy.run(lambda: stage.array(1.0 + replica_id()))

    def twice() -> Any:
        array = stage.function("asarray")(value)
        return array + array

    return {"local_results": strategy.experimental_local_results(strategy.run(twice))}


HANDLERS: dict[str, Handler] = {
    "run": run,
    "run_args": run_args,
    "local_results_plain": local_results_plain,
    "local_results_distributed": local_results_distributed,
    "distribute_values_from_function": distribute_values_from_function,
    "value_context_str": value_context_str,
    "per_replica_misuse": per_replica_misuse,
    "per_replica_captured": per_replica_captured,
}
