"""Area distribute_dataset: the inputs of tf.compat.v1."""

from __future__ import annotations

import itertools
import re
from typing import Any

from conformance import sources
from conformance.outcomes import CannotInterpret, probe
from conformance.replay_input_context import described
from conformance.stage import Handler, Stage
from mpistrat.options import InputReplicationMode


def _runs(strategy: Any, iterator: Any, number: int, fn: str = "x") -> list[Any]:
    """`fn`, an expression of x, run on a step at a time."""

    def program(x: Any) -> Any:
        return eval(fn, {"__builtins__": {}}, {"x": x})  # recorded, not foreign

    def run() -> Any:
        result = strategy.experimental_run(program, iterator)
        return strategy.experimental_local_results(result)

    return [probe(run) for _ in range(number)]


def _dataset(stage: Stage) -> Any:
    return sources.dataset(stage.inputs["source"], stage.library, stage.form)


def make_dataset_iterator(stage: Stage) -> Any:
    strategy = stage.v1_strategy()
    iterator = strategy.make_dataset_iterator(_dataset(stage))
    iterator.initialize()
    return {"runs": _runs(strategy, iterator, stage.program["runs"], stage.program["fn"])}


def make_input_fn_iterator(stage: Stage) -> Any:
    strategy = stage.v1_strategy()
    contexts: list[Any] = []

    def input_fn(context: Any) -> Any:
        contexts.append(described(context))
        return _dataset(stage)

    iterator = strategy.make_input_fn_iterator(input_fn)
    iterator.initialize()
    runs = _runs(strategy, iterator, stage.program["runs"], stage.program["fn"])
    return {"contexts": contexts, "runs": runs}


def make_input_fn_iterator_callable(stage: Stage) -> Any:
    """The note says what is called; the number of runs is not recorded but in the result."""
    if stage.program["note"] != "input_fn returns a counter callable (1,2,3..)":
        raise CannotInterpret(f"note {stage.program['note']!r}")
    strategy, counter = stage.v1_strategy(), itertools.count(1)
    iterator = strategy.make_input_fn_iterator(
        lambda context: lambda: stage.array(next(counter), "int32")
    )
    return {"runs": _runs(strategy, iterator, len(stage.case["expect"]["runs"]))}


def make_input_fn_iterator_per_replica(stage: Stage) -> Any:
    return stage.v1_strategy().make_input_fn_iterator(
        lambda context: [stage.array([1.0])], InputReplicationMode.PER_REPLICA
    )


def make_input_fn_iterator_bad_return(stage: Stage) -> Any:
    stage.v1_strategy().make_input_fn_iterator(lambda context: 5)


def make_numpy_dataset(stage: Stage) -> Any:
    strategy = stage.v1_strategy()
    with strategy.scope():
        made = strategy.experimental_make_numpy_dataset(stage.decode(stage.inputs["value"]))
    return {"elements": list(made)}


def run_no_iterator(stage: Stage) -> Any:
    match = re.fullmatch(r"const (\d+); reduce without axis argument", stage.program["fn"])
    if match is None:
        raise CannotInterpret(f"fn {stage.program['fn']!r}")
    strategy = stage.v1_strategy()
    result = strategy.experimental_run(lambda: stage.array(int(match[1]), "int32"))
    return {
        "local_results": strategy.experimental_local_results(result),
        "reduce_default_axis": strategy.reduce("SUM", result),
    }


def reduce_without_axis(stage: Stage) -> Any:
    strategy = stage.strategy()
    return strategy.reduce("SUM", strategy.run(lambda: stage.array(1.0)))


HANDLERS: dict[str, Handler] = {
    "v1_make_dataset_iterator": make_dataset_iterator,
    "v1_make_input_fn_iterator": make_input_fn_iterator,
    "v1_make_input_fn_iterator_callable": make_input_fn_iterator_callable,
    "v1_make_input_fn_iterator_per_replica": make_input_fn_iterator_per_replica,
    "v1_make_input_fn_iterator_bad_return": make_input_fn_iterator_bad_return,
    "v1_experimental_make_numpy_dataset": make_numpy_dataset,
    "v1_experimental_run_no_iterator": run_no_iterator,
    "v2_reduce_without_axis": reduce_without_axis,
}
