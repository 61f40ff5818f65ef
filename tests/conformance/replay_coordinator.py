"""Area coordinator: rank 0 of four is the chief; the others are one worker and two servers, or two workers and one."""

from __future__ import annotations

import functools
import operator
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np

import mpistrat as ms
from conformance.outcomes import CannotInterpret, attempt, probe
from conformance.stage import Handler, Stage
from mpistrat.cluster_resolver import ClusterSpec, SimpleClusterResolver
from mpistrat.coordinator import (
    ClusterCoordinator,
    PerWorkerValues,
    experimental_get_current_worker_index,
)
from mpistrat.errors import CancelledError, InvalidArgumentError, OutOfRangeError

RANKS = 4
SERVER_TASK = {"served": True}  # what the ranks come to that the chief uses
SECONDS = 0.05  # of a slow function

# With a coordinator, its strategy, and the stage.
Program = Callable[[ClusterCoordinator, Any, Stage], Any]


def _in_job(program: Program, servers: int = 2) -> Handler:
    """`program` on the chief of a job with so many servers; the case may name a partitioner."""

    def handler(stage: Stage) -> Any:
        try:
            strategy = ms.ParameterServerStrategy(
                variable_partitioner=_partitioner(stage.program.get("partitioner")), num_ps=servers
            )
        except SystemExit:
            return SERVER_TASK
        try:
            return program(ClusterCoordinator(strategy), strategy, stage)
        finally:
            strategy.shutdown()

    return handler


def _partitioner(name: str | None) -> Any:
    partitioners = ms.experimental.partitioners
    if name in (None, "none"):
        return None
    if fixed := re.fullmatch(r"(?i:fixed)\(?(\d+)\)?", name):
        return partitioners.FixedShardsPartitioner(int(fixed[1]))
    if name == "max":  # three rows of a vector of floats
        return partitioners.MaxSizePartitioner(12)
    if returns := re.fullmatch(r"returns_\[([\d,]*)\]", name):
        partitions = [int(number) for number in returns[1].split(",") if number]
        return lambda shape, dtype, axis=0: partitions
    raise CannotInterpret(f"partitioner {name!r}")


def construct(stage: Stage) -> Any:
    resolver = SimpleClusterResolver(ClusterSpec(stage.inputs["cluster"]), **stage.inputs["kwargs"])
    return ms.ParameterServerStrategy(resolver)


def properties(coordinator: ClusterCoordinator, strategy: Any, stage: Stage) -> Any:
    return {
        "num_replicas_in_sync": strategy.num_replicas_in_sync,
        "singleton": ClusterCoordinator(strategy) is coordinator,
        "coordinator_strategy_is_strategy": coordinator.strategy is strategy,
        "worker_devices": strategy.extended.worker_devices,
        "parameter_devices": strategy.extended.parameter_devices,
        "done_initially": coordinator.done(),
    }


def placement(coordinator: ClusterCoordinator, strategy: Any, stage: Stage) -> Any:
    """Five scalars, then a matrix that is split, then a vector of one element, then a matrix made part by part."""
    matrix = stage.array(np.arange(10.0).reshape(5, 2))
    with strategy.scope():
        scalars = [ms.Variable(stage.array(1.0)) for _ in range(5)]
        big = ms.Variable(matrix)
        single = ms.Variable(stage.array([1.0]))
        made = ms.Variable(lambda: matrix)
    return {
        "scalars_devices": [_task(shard) for shard in scalars],
        "big_type": _kind(big),
        "big_shards": [[list(shard.shape), _task(shard), _kind(shard)] for shard in big.variables],
        "big_values": [shard.read_value() for shard in big.variables],
        "len1_type": _kind(single),
        "emb_shards": [list(shard.shape) for shard in made.variables],
    }


def _task(variable: Any) -> str:
    """Such as "job:ps/task:1"."""
    named = re.match(r"/job:(\w+)/replica:0/task:(\d+)/", variable.device)
    assert named is not None, variable.device
    return f"job:{named[1]}/task:{named[2]}"


def _kind(variable: ms.Variable) -> str:
    return "ShardedVariable" if isinstance(variable, ms.ShardedVariable) else "Variable"


def partitioned(coordinator: ClusterCoordinator, strategy: Any, stage: Stage) -> Any:
    with strategy.scope():
        made = ms.Variable(stage.array(np.zeros(stage.inputs["shape"])))
    shards = made.variables if isinstance(made, ms.ShardedVariable) else [made]
    return {"type": _kind(made), "shards": [list(shard.shape) for shard in shards]}


def structure(coordinator: ClusterCoordinator, strategy: Any, stage: Stage) -> Any:
    """The function is an expression of x, such as "{'a': x} on 1"."""
    expression, _, number = stage.program["fn"].rpartition(" on ")
    x = stage.array(int(number), "int32")
    returned = coordinator.schedule(_evaluated, args=(expression, x))
    return {"fetch": coordinator.fetch(returned)}


def _evaluated(expression: str, x: Any) -> Any:
    return eval(expression, {"__builtins__": {}}, {"x": x})


def with_kwargs(coordinator: ClusterCoordinator, strategy: Any, stage: Stage) -> Any:
    four, five = stage.array(4, "int32"), stage.array(5, "int32")
    returned = coordinator.schedule(lambda x, y: x + y, args=(four,), kwargs={"y": five})
    return {"fetch": coordinator.fetch(returned)}


def concrete(coordinator: ClusterCoordinator, strategy: Any, stage: Stage) -> Any:
    """What comes nearest to one: arguments that are fixed."""
    two = stage.array(2, "int32")
    return {
        "fetch": coordinator.fetch(coordinator.schedule(functools.partial(operator.mul, two, two)))
    }


def ten_adds(coordinator: ClusterCoordinator, strategy: Any, stage: Stage) -> Any:
    with strategy.scope():
        variable = ms.Variable(stage.array(0.0))
    for _ in range(10):
        coordinator.schedule(lambda: variable.assign_add(1.0))
    coordinator.join()
    return {"v": variable.read_value(), "done": coordinator.done()}


def no_function(coordinator: ClusterCoordinator, strategy: Any, stage: Stage) -> Any:
    if stage.inputs["fn"] != "none":
        raise CannotInterpret(f"fn {stage.inputs['fn']!r}")
    return coordinator.schedule(None)  # type: ignore[arg-type]


def remote_argument(coordinator: ClusterCoordinator, strategy: Any, stage: Stage) -> Any:
    value = coordinator.schedule(lambda: 1)
    return coordinator.schedule(lambda x: x, args=(value,))


def _fail() -> NoReturn:
    raise InvalidArgumentError("what the function was asked for cannot be done")


def raised_at_schedule(coordinator: ClusterCoordinator, strategy: Any, stage: Stage) -> Any:
    failed = coordinator.schedule(_fail)
    attempt(failed.get)
    return {
        "schedule_after_failure": probe(lambda: coordinator.schedule(lambda: None)),
        "join_then": probe(coordinator.join),
        "fetch_of_failed": probe(failed.fetch),
    }


def fetched_before_join(coordinator: ClusterCoordinator, strategy: Any, stage: Stage) -> Any:
    failed = coordinator.schedule(_fail)
    return {"fetch": probe(failed.fetch), "join_after_fetch": probe(coordinator.join)}


def cancelled(coordinator: ClusterCoordinator, strategy: Any, stage: Stage) -> Any:
    def slow() -> None:
        time.sleep(SECONDS)

    others = [coordinator.schedule(slow) for _ in range(2)]
    failed = coordinator.schedule(_fail)
    others += [coordinator.schedule(slow) for _ in range(20)]
    joined = probe(coordinator.join)
    came_to = [type(_error_of(value)) for value in others]
    return {
        "join": joined,
        "failed_fetch": type(_error_of(failed)).__name__,
        "others_only_ok_or_cancelled": set(came_to) <= {type(None), CancelledError},
        "some_cancelled": CancelledError in came_to,
    }


def _error_of(value: Any) -> Exception | None:
    try:
        value.fetch()
    except Exception as error:
        return error
    return None


def dataset_from_function(coordinator: ClusterCoordinator, strategy: Any, stage: Stage) -> Any:
    dataset = coordinator.create_per_worker_dataset(lambda: stage.array(np.arange(3), "int64"))
    iterator = iter(dataset)
    values = sorted(_elements(coordinator, iterator, 4))
    return {
        "type": type(iterator).__name__,
        "values_sorted_are_subset_of_two_copies": all(values.count(value) <= 2 for value in values)
        and set(values) <= {0, 1, 2}
        and len(values) >= 3,
        "element_spec": list(iterator.element_spec.shape),
    }


def _elements(coordinator: ClusterCoordinator, iterator: Any, number: int) -> list[int]:
    """Of so many calls of next, by any worker, those that found one."""
    scheduled = [coordinator.schedule(next, args=(iterator,)) for _ in range(number)]
    found = [value for value in scheduled if not isinstance(_error_of(value), OutOfRangeError)]
    attempt(coordinator.join)
    return [int(value.fetch()) for value in found]


def bad_dataset(coordinator: ClusterCoordinator, strategy: Any, stage: Stage) -> Any:
    return coordinator.create_per_worker_dataset(5)


def next_on_chief(coordinator: ClusterCoordinator, strategy: Any, stage: Stage) -> Any:
    return next(iter(coordinator.create_per_worker_dataset(lambda: [stage.array([1.0])])))


def dataset_with_variable(coordinator: ClusterCoordinator, strategy: Any, stage: Stage) -> Any:
    def make() -> Any:
        ms.Variable(1.0)
        return [stage.array([1.0])]

    return coordinator.create_per_worker_dataset(make)


def distributed_dataset(coordinator: ClusterCoordinator, strategy: Any, stage: Stage) -> Any:
    dataset = strategy.experimental_distribute_dataset([stage.array(i, "int64") for i in range(2)])
    iterator = iter(coordinator.create_per_worker_dataset(dataset))
    return {
        "iter_directly": attempt(lambda: iter(dataset)),
        "cardinality": attempt(lambda: dataset.cardinality),
        "via_coordinator": _elements(coordinator, iterator, 2),
    }


def worker_index(coordinator: ClusterCoordinator, strategy: Any, stage: Stage) -> Any:
    def make() -> Iterator[Any]:
        return iter([stage.array(experimental_get_current_worker_index(), "int64")] * 10)

    iterator = iter(coordinator.create_per_worker_dataset(make))
    indices = _elements(coordinator, iterator, 6)
    return {"indices_subset": set(indices) <= {0, 1}, "nonempty": bool(indices)}


def assign_add_in_run(coordinator: ClusterCoordinator, strategy: Any, stage: Stage) -> Any:
    aggregation = ms.VariableAggregation[stage.program["aggregation"]]
    with strategy.scope():
        variable = ms.Variable(stage.array(stage.inputs["init"]), aggregation=aggregation)

    def step() -> Any:
        return strategy.run(lambda: variable.assign_add(1.0))

    fetched = coordinator.fetch(coordinator.schedule(step))
    return {"fetch": fetched, "after": variable.read_value()}


def _on_mirrored(stage: Stage) -> Any:
    return ClusterCoordinator(ms.MirroredStrategy(["cpu:0"]))


HANDLERS: dict[str, Handler] = {
    "ParameterServerStrategy": construct,
    "ClusterCoordinator(MirroredStrategy)": _on_mirrored,
    "PerWorkerValues([1])": lambda stage: PerWorkerValues([1]),  # type: ignore[list-item]
    "experimental_get_current_worker_index outside": lambda stage: (
        experimental_get_current_worker_index()
    ),
    "ps_properties": _in_job(properties),
    "ps_variable_placement": _in_job(placement),
    "ps_partitioned_variable": _in_job(partitioned),
    "schedule+fetch": _in_job(structure),
    "schedule kwargs": _in_job(with_kwargs),
    "schedule 10x v+=1; join": _in_job(ten_adds, servers=1),
    "schedule non-function": _in_job(no_function),
    "schedule concrete function": _in_job(concrete),
    "schedule with RemoteValue argument": _in_job(remote_argument),
    "failing function, wait, schedule, join": _in_job(raised_at_schedule, servers=1),
    "failing function; fetch first, then join": _in_job(fetched_before_join, servers=1),
    "2 slow + 1 failing + 20 slow functions; join; fetch all": _in_job(cancelled, servers=1),
    "create_per_worker_dataset(range(3)), 4x next": _in_job(dataset_from_function, servers=1),
    "create_per_worker_dataset(5)": _in_job(bad_dataset),
    "next(iter(per_worker_dataset)) on coordinator": _in_job(next_on_chief),
    "create_per_worker_dataset with variable creation": _in_job(dataset_with_variable),
    "experimental_distribute_dataset under PS strategy": _in_job(distributed_dataset),
    "experimental_get_current_worker_index in dataset_fn": _in_job(worker_index, servers=1),
    "scheduled fn: run(v.assign_add(1))": _in_job(assign_add_in_run),
}
