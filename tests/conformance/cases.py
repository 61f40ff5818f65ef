"""The recorded cases of a folder, and what replays them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from conformance import (
    encoding,
    replay_autoshard,
    replay_cloud_resolvers,
    replay_contexts,
    replay_coordinator,
    replay_cross_device_ops,
    replay_custom_ops,
    replay_datasets_from_function,
    replay_distribute_dataset,
    replay_extended,
    replay_input_context,
    replay_merge_call,
    replay_multi_worker,
    replay_preemption,
    replay_reduce,
    replay_replica_collectives,
    replay_resolvers,
    replay_run,
    replay_sharded_variable,
    replay_tpu,
    replay_v1_input,
    replay_variable_uses,
    replay_variables,
    sources,
)
from conformance.outcomes import CannotInterpret, Failed
from conformance.stage import Handler, Stage

RECORDED = Path(__file__).parent / "golden"


def _of_one_process(handler: Callable[[dict[str, Any]], Any]) -> Handler:
    return lambda stage: _with_failures(handler(stage.case))


def _with_failures(result: Any) -> Any:
    """`result` with the errors of probed fields, `{"raised": error}`, as this driver has them."""
    if isinstance(result, dict):
        if set(result) == {"raised"}:
            return Failed(result["raised"])
        return {name: _with_failures(child) for name, child in result.items()}
    return result


_RESOLVERS: dict[str, Handler] = {
    op: _of_one_process(handler)
    for handlers in (replay_resolvers.HANDLERS, replay_cloud_resolvers.HANDLERS)
    for op, handler in handlers.items()
}
# No arrays are given.
ONE_LIBRARY = ("contexts", "input_context", "autoshard", "partitioners", "preemption")
RESOLVER_AREAS = ("cluster_spec", "resolvers", "slurm", "multi_worker_util")
HANDLERS: dict[str, dict[str, Handler]] = {
    "contexts": replay_contexts.HANDLERS,
    "run": replay_run.HANDLERS,
    "merge_call": replay_merge_call.HANDLERS,
    "reduce": replay_reduce.HANDLERS,
    "gather": replay_reduce.HANDLERS,
    "replica_collectives": replay_replica_collectives.HANDLERS,
    "cross_device_ops": {**replay_cross_device_ops.HANDLERS, **replay_custom_ops.HANDLERS},
    "extended": replay_extended.HANDLERS,
    "variables": {**replay_variables.HANDLERS, **replay_variable_uses.HANDLERS},
    "distribute_dataset": {**replay_distribute_dataset.HANDLERS, **replay_v1_input.HANDLERS},
    "datasets_from_function": replay_datasets_from_function.HANDLERS,
    "input_context": replay_input_context.HANDLERS,
    "autoshard": replay_autoshard.HANDLERS,
    "preemption": replay_preemption.HANDLERS,
    "partitioners": replay_sharded_variable.PARTITIONERS,
    "sharded_variable": replay_sharded_variable.HANDLERS,
    "coordinator": replay_coordinator.HANDLERS,
    "tpu_topology": replay_tpu.HANDLERS,
    "multi_worker": {
        **replay_multi_worker.HANDLERS,
        **replay_distribute_dataset.OF_WORKERS,
        **replay_datasets_from_function.OF_WORKERS,
    },
    **dict.fromkeys(RESOLVER_AREAS, _RESOLVERS),
}

# Under MPI no rank comes back. In tests/launch/test_parameter_server_faults.py:
_OF_DEATHS = {
    "kill worker 1 during 40 scheduled v+=1, restart it, join": "test_workers_of_a_coordinator_are_killed",
    "create iterator, kill+restart worker 0, keep scheduling next": "the same test, of which each function calls next",
    "kill the ps that holds v, schedule v+=1, join": "test_a_server_is_killed",
}
# What is not replayed here, and the test that does the same.
REPLAYED_ELSEWHERE = {
    **{("coordinator", op): test for op, test in _OF_DEATHS.items()},
    ("tpu_topology", "tpu_run_validation"): "tests/tpu/test_recorded_runs.py, with torch_xla",
    ("tpu_topology", "replicate_to_logical_devices"): "tests/tpu/test_assignments.py",
}


def folder() -> Path:
    """The folder to replay: MPISTRAT_GOLDEN, or the recorded cases of this project."""
    return Path(os.environ.get("MPISTRAT_GOLDEN") or RECORDED)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Every case of `path`, in a fixed order."""
    files = sorted(path.glob("*.json"))
    if not files:
        raise FileNotFoundError(
            f"no recorded cases in {path}; set MPISTRAT_GOLDEN to a folder of them"
        )
    for file in files:
        yield from json.loads(file.read_text())["cases"]


def load(path: Path) -> Iterator[dict[str, Any]]:
    """Those of `path` that are replayed here."""
    for case in read(path):
        if (case["area"], case["program"]["op"]) not in REPLAYED_ELSEWHERE:
            yield case


def stages(case: dict[str, Any], rank: int, size: int) -> list[Stage]:
    """`case` on this rank, with each array library and form of dataset that it is replayed with."""
    source = case["inputs"].get("source")
    if "counts" in case["inputs"]:
        source = replay_datasets_from_function.source_of_worker(case, rank)
    if source is not None and "ops" in source:
        return [Stage(case, library, rank, size, form) for library, form in sources.forms(source)]
    return [Stage(case, library, rank, size) for library in libraries(case)]


def libraries(case: dict[str, Any]) -> tuple[encoding.Library, ...]:
    """The array libraries to replay `case` with: both, where it has arrays and both have its dtypes."""
    if case["program"]["op"].startswith("grad_"):
        return ("torch",)  # NumPy has no gradients
    if case["area"] == "sharded_variable":
        return encoding.LIBRARIES
    if case["area"] in (*ONE_LIBRARY, *RESOLVER_AREAS) or case["replicas"] == 0:
        return ("numpy",)
    dtypes = {*encoding.dtypes(case["inputs"]), *encoding.dtypes(case["program"])}
    return tuple(
        library
        for library in encoding.LIBRARIES
        if all(encoding.has_dtype(library, dtype) for dtype in dtypes)
    )


def replay(stage: Stage) -> Any:
    """Run the program of a case. An error is the caller's to judge."""
    area, op = stage.case["area"], stage.program["op"]
    handler = HANDLERS.get(area, {}).get(op)
    if handler is None:
        raise CannotInterpret(f"no handler for op {op!r} of area {area!r}")
    return handler(stage)
