"""Area datasets_from_function, and that op of area multi_worker: batches per replica, of the user's own making."""

from __future__ import annotations

import re
from typing import Any

from conformance import sources
from conformance.outcomes import CannotInterpret
from conformance.replay_distribute_dataset import local_steps, walked
from conformance.replay_input_context import described, input_options
from conformance.stage import Handler, Stage


def distribute_datasets_from_function(stage: Stage) -> Any:
    strategy, source = stage.strategy(), stage.inputs["source"]
    options = input_options(stage.program["options"], source.get("policy"))
    contexts: list[Any] = []
    made: list[Any] = []

    def dataset_fn(context: Any) -> Any:
        contexts.append(described(context))
        made.append(sources.dataset(source, stage.library, stage.form))
        return made[-1]

    distributed = strategy.distribute_datasets_from_function(dataset_fn, options)
    seen = walked(strategy, distributed, stage.program["max_steps"])
    if distributed is made[0]:
        seen["is_dataset"] = True
    return {**seen, "contexts": contexts}


def function_raises(stage: Stage) -> Any:
    def dataset_fn(context: Any) -> Any:
        return 1 // 0

    stage.strategy().distribute_datasets_from_function(dataset_fn)


def function_returns_no_dataset(stage: Stage) -> Any:
    next(iter(stage.strategy().distribute_datasets_from_function(lambda context: 5)))


def source_of_worker(case: dict[str, Any], worker: int) -> sources.Source:
    """What a worker's dataset is: the note says it."""
    note = case["program"]["note"]
    match = re.fullmatch(r"worker w: range\(counts\[w\]\) \+ (\d+)\*w, batch (\d+)", note)
    if match is None:
        raise CannotInterpret(f"note {note!r}")
    ops = [["map_add", int(match[1]) * worker], ["batch", int(match[2]), False]]
    return {"kind": "range", "n": case["inputs"]["counts"][worker], "ops": ops}


def of_worker(stage: Stage) -> Any:
    strategy, source = stage.strategy(), source_of_worker(stage.case, stage.rank)
    contexts: list[Any] = []

    def dataset_fn(context: Any) -> Any:
        contexts.append(described(context))
        return sources.dataset(source, stage.library, stage.form)

    distributed = strategy.distribute_datasets_from_function(dataset_fn)
    steps, _ = local_steps(strategy, iter(distributed))
    return {"contexts": contexts, "steps": steps}


HANDLERS: dict[str, Handler] = {
    "distribute_datasets_from_function": distribute_datasets_from_function,
    "distribute_datasets_from_function_raises": function_raises,
    "distribute_datasets_from_function_bad_return": function_returns_no_dataset,
}
OF_WORKERS: dict[str, Handler] = {"distribute_datasets_from_function": of_worker}
