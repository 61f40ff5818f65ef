"""Area input_context: what dataset functions are told, and the options of inputs."""

from __future__ import annotations

from typing import Any

import mpistrat as ms
from conformance.outcomes import CannotInterpret
from conformance.stage import Handler, Stage
from mpistrat import options


def described(context: Any) -> list[int]:
    """An InputContext, as it is recorded."""
    return [
        context.num_input_pipelines,
        context.input_pipeline_id,
        context.num_replicas_in_sync,
    ]


def input_options(values: dict[str, Any] | None, policy: str | None = None) -> Any:
    """The recorded options and, of a dataset's own options, the policy; None for neither."""
    if values is None and policy is None:
        return None
    arguments = dict(values or {})
    mode = arguments.get("experimental_replication_mode")
    if mode is not None:
        if mode not in options.InputReplicationMode.__members__:
            raise CannotInterpret(f"replication mode {mode!r}")
        arguments["experimental_replication_mode"] = options.InputReplicationMode[mode]
    if policy is not None:
        arguments["experimental_auto_shard_policy"] = policy
    return options.InputOptions(**arguments)


def get_per_replica_batch_size(stage: Stage) -> Any:
    context = ms.InputContext(num_replicas_in_sync=stage.program["num_replicas_in_sync"])
    return {"value": context.get_per_replica_batch_size(stage.inputs["global_batch_size"])}


def input_context(stage: Stage) -> Any:
    return {"value": described(ms.InputContext(**stage.inputs))}


def input_options_fields(stage: Stage) -> Any:
    """Fetching to devices may be None, which means True."""
    made = input_options(stage.inputs) or options.InputOptions()
    return {
        "fetch": made.experimental_fetch_to_device is not False,
        "mode": made.experimental_replication_mode.name,
        "place": made.experimental_place_dataset_on_device,
        "buffer": made.experimental_per_replica_buffer_size,
    }


def run_options(stage: Stage) -> Any:
    made = ms.RunOptions(**stage.inputs)
    return {
        "value": [
            made.experimental_enable_dynamic_batch_size,
            made.experimental_bucketizing_dynamic_shape,
            made.experimental_xla_options,
        ]
    }


HANDLERS: dict[str, Handler] = {
    "get_per_replica_batch_size": get_per_replica_batch_size,
    "InputContext()": input_context,
    "InputOptions": input_options_fields,
    "RunOptions": run_options,
}
