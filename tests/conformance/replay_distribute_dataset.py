"""Area distribute_dataset, and the op of that name of area multi_worker: who reads what in which step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import mpistrat as ms
from conformance import sources
from conformance.outcomes import CannotInterpret, attempt, probe
from conformance.replay_input_context import input_options
from conformance.stage import Handler, Stage
from mpistrat import arrays, nest

_END = object()


def local_steps(
    strategy: Any, iterator: Iterator[Any], max_steps: int | None = None
) -> tuple[list[Any], bool]:
    """What this rank's replicas get in each step, and whether that was all."""
    steps: list[Any] = []
    while max_steps is None or len(steps) < max_steps:
        step = next(iterator, _END)
        if step is _END:
            return steps, True
        steps.append(strategy.experimental_local_results(step))
    return steps, False


def walked(strategy: Any, distributed: Any, max_steps: int) -> dict[str, Any]:
    """The steps of a distributed dataset, what comes after them, and the spec of an element."""
    iterator = iter(distributed)
    steps, ended = local_steps(strategy, iterator, max_steps)
    seen: dict[str, Any] = {"steps": steps, "ended": ended}
    if ended:
        seen["next_after_end"] = attempt(lambda: next(iterator))
    if not isinstance(distributed, ms.DistributedDataset):
        return seen  # any iterable
    if ended:
        seen["after_end"] = attempt(iterator.get_next)
        optional = probe(lambda: iterator.get_next_as_optional().has_value())
        seen["optional_after_end_has_value"] = optional
    seen["element_spec"] = recorded_spec(distributed.element_spec)
    return seen


def recorded_spec(spec: Any) -> Any:
    """The specs of an element's arrays, as they are recorded; None where nothing is known."""
    return None if spec is None else [_recorded(leaf) for leaf in nest.flatten(spec)]


def _recorded(spec: Any) -> dict[str, Any]:
    if hasattr(spec, "specs"):
        return {"per_replica": [_recorded(component) for component in spec.specs]}
    dtype = "string" if spec.dtype == "str" else spec.dtype
    return {"dtype": dtype, "shape": list(spec.shape)}


def distribute_dataset(stage: Stage) -> Any:
    strategy, source = stage.strategy(), stage.inputs["source"]
    dataset = sources.dataset(source, stage.library, stage.form)
    options = input_options(stage.program["options"], source.get("policy"))
    distributed = strategy.experimental_distribute_dataset(dataset, options)
    seen = walked(strategy, distributed, stage.program["max_steps"])
    if distributed is dataset:
        return {**seen, "is_dataset": True}
    return {
        **seen,
        "cardinality": distributed.cardinality,
        "type": type(distributed).__name__,
    }


def distribute_dataset_of_worker(stage: Stage) -> Any:
    """Where the number of steps is limited, only they are recorded."""
    strategy, source = stage.strategy(), stage.inputs["source"]
    dataset = sources.dataset(source, stage.library, stage.form)
    options = input_options(None, source.get("policy"))
    distributed = strategy.experimental_distribute_dataset(dataset, options)
    max_steps = stage.program.get("max_steps")
    steps, _ = local_steps(strategy, iter(distributed), max_steps)
    if max_steps is not None:
        return {"steps": steps}
    return {"steps": steps, "element_spec": recorded_spec(distributed.element_spec)}


def bad_operand(stage: Stage) -> Any:
    """What is wrong with an iterable of other things is seen when it is read."""
    operand = stage.decode(stage.inputs["value"])
    next(iter(stage.strategy().experimental_distribute_dataset(operand)))


def per_replica_mode(stage: Stage) -> Any:
    options = input_options({"experimental_replication_mode": "PER_REPLICA"})
    return stage.strategy().experimental_distribute_dataset(_batches(stage), options)


def _batches(stage: Stage) -> Any:
    """A dataset, where none is recorded."""
    source = {"kind": "range", "n": 8, "ops": [["batch", 4, False]]}
    return sources.dataset(source, stage.library, "iterable")


def no_transformations(stage: Stage) -> Any:
    distributed = stage.strategy().experimental_distribute_dataset(_batches(stage))
    return {
        "has_map": hasattr(distributed, "map"),
        "has_batch": hasattr(distributed, "batch"),
        "len": attempt(lambda: len(distributed)),
    }


def _distributed(stage: Stage) -> tuple[Any, Iterable[Any]]:
    strategy = stage.strategy()
    dataset = sources.dataset(stage.inputs["source"], stage.library, stage.form)
    return strategy, strategy.experimental_distribute_dataset(dataset)


def iterate_and_reduce(stage: Stage) -> Any:
    """A step at a time: the sum over replicas of what each sums up. Two steps, and one more."""
    strategy, distributed = _distributed(stage)
    iterator: Any = iter(distributed)

    def total() -> Any:
        parts = strategy.run(lambda x: x.sum(), args=(iterator.get_next(),))
        return strategy.reduce("SUM", parts, axis=None)

    return {"sums": [total(), total()], "third": attempt(total)}


def get_next_as_optional(stage: Stage) -> Any:
    """All optionals, up to the first without a value; and the first steps of two iterators at once."""
    strategy, distributed = _distributed(stage)

    def optionals() -> Iterator[dict[str, Any]]:
        iterator: Any = iter(distributed)
        while True:
            optional = iterator.get_next_as_optional()
            has_value = optional.has_value()
            value = strategy.experimental_local_results(optional.get_value()) if has_value else None
            yield {"has_value": has_value, "value": value}
            if not has_value:
                return

    iterators: list[Any] = [iter(distributed), iter(distributed)]
    return {
        "optionals": list(optionals()),
        "two_iterators_independent": [
            strategy.experimental_local_results(iterator.get_next()) for iterator in iterators
        ],
    }


def next_inside_run(stage: Stage) -> Any:
    strategy, distributed = _distributed(stage)
    iterator = iter(distributed)
    strategy.run(lambda: next(iterator))


def next_under_other_scope(stage: Stage) -> Any:
    _, distributed = _distributed(stage)
    iterator = iter(distributed)
    with stage.strategy().scope():
        next(iterator)


def dataset_reduce(stage: Stage) -> Any:
    if stage.program["fn"] != "s + sum(global batch)":
        raise CannotInterpret(f"fn {stage.program['fn']!r}")
    strategy, distributed = _distributed(stage)

    def add(total: Any, step: Any) -> Any:
        parts = strategy.run(lambda x: x.sum(), args=(step,))
        return total + strategy.reduce("SUM", parts, axis=None)

    assert isinstance(distributed, ms.DistributedDataset)
    return {"value": distributed.reduce(stage.array(0, "int64"), add)}


def reduce_each_step_axis0(stage: Stage) -> Any:
    strategy, distributed = _distributed(stage)
    reduced = []
    for step in distributed:
        floats = strategy.run(lambda x: arrays.cast(x, "float32"), args=(step,))
        mean = strategy.reduce("MEAN", floats, axis=0)
        reduced.append({"mean_axis0": mean, "sum_axis0": strategy.reduce("SUM", floats, axis=0)})
    return {"steps": reduced}


HANDLERS: dict[str, Handler] = {
    "distribute_dataset": distribute_dataset,
    "distribute_dataset_bad_operand": bad_operand,
    "distribute_dataset_per_replica_mode": per_replica_mode,
    "dist_dataset_has_no_transformations": no_transformations,
    "iterate_and_reduce_in_function": iterate_and_reduce,
    "reduce_each_step_axis0": reduce_each_step_axis0,
    "get_next_as_optional": get_next_as_optional,
    "next_inside_run": next_inside_run,
    "next_under_other_strategy_scope": next_under_other_scope,
    "dist_dataset.reduce": dataset_reduce,
}
OF_WORKERS: dict[str, Handler] = {"distribute_dataset": distribute_dataset_of_worker}
