"""Performs the recorded programs about cluster specs, resolvers and task roles.

Each handler takes a case and returns what the case expects, in the recorded shape: fields that were probed one by
one are {"ok": value} or {"raised": exception}; an exception of the whole program propagates.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from typing import Any

from mpistrat.cluster_resolver import (
    ClusterResolver,
    ClusterSpec,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    UnionResolver,
    task_roles,
)
from mpistrat.cluster_resolver.slurm.hostlist import expand_hostlist, expand_tasks_per_node

Case = dict[str, Any]


def probe(ask: Callable[[], object]) -> dict[str, object]:
    try:
        return {"ok": _plain(ask())}
    except Exception as error:
        return {"raised": error}


def _plain(value: object) -> Any:
    """As JSON holds it: tuples are lists, keys are text, a ClusterSpec is its dict."""
    if isinstance(value, ClusterSpec):
        value = value.as_dict()
    return json.loads(json.dumps(value))


def _cluster(recorded: Any) -> Any:
    """What was no JSON was recorded as its repr: "None", "{'worker': [1]}"."""
    return ast.literal_eval(recorded) if isinstance(recorded, str) else recorded


def _cluster_spec(case: Case) -> dict[str, object]:
    cluster = _cluster(case["inputs"]["cluster"])
    spec = ClusterSpec(cluster)
    fields: dict[str, object] = {
        "as_dict": _plain(spec),
        "jobs": spec.jobs,
        "bool": bool(spec),
        "repr": repr(spec),
        "equal_to_copy": spec == ClusterSpec(spec) == ClusterSpec(cluster),
        "roundtrip_cluster_def": probe(lambda: ClusterSpec(spec.as_cluster_def())),
    }
    for job in ("worker", "ps", "nope"):
        fields[f"num_tasks({job})"] = probe(lambda job=job: spec.num_tasks(job))
        fields[f"task_indices({job})"] = probe(lambda job=job: spec.task_indices(job))
        fields[f"job_tasks({job})"] = probe(lambda job=job: spec.job_tasks(job))
        fields[f"task_address({job},1)"] = probe(lambda job=job: spec.task_address(job, 1))
    return fields


def resolver_fields(resolver: ClusterResolver) -> dict[str, object]:
    fields: dict[str, object] = {
        "cluster_spec": probe(resolver.cluster_spec),
        "task_type": probe(lambda: resolver.task_type),
        "task_id": probe(lambda: resolver.task_id),
        "rpc_layer": probe(lambda: resolver.rpc_layer),
        "environment": probe(lambda: resolver.environment),
        "master()": probe(resolver.master),
    }
    for job, index, layer in (
        ("worker", 0, None),
        ("worker", 1, None),
        ("worker", 0, "http"),
        ("ps", 0, None),
        ("nope", 0, None),
        ("worker", 99, None),
        ("worker", None, None),
        (None, 1, None),
    ):
        fields[f"master({job},{index},{layer})"] = probe(
            lambda task=(job, index), layer=layer: resolver.master(*task, rpc_layer=layer)
        )
    return fields


def _simple_resolver(case: Case) -> dict[str, object]:
    inputs = case["inputs"]
    cluster = inputs["cluster"] if inputs.get("raw_dict") else ClusterSpec(inputs["cluster"])
    resolver = SimpleClusterResolver(cluster, **inputs.get("kwargs", {}))
    return {**resolver_fields(resolver), "num_accelerators": resolver.num_accelerators()}


def _simple_resolver_setters(case: Case) -> dict[str, object]:
    resolver = SimpleClusterResolver(ClusterSpec(case["inputs"]["cluster"]))
    for name, value in case["program"]["set"].items():
        setattr(resolver, name, value)
    return resolver_fields(resolver)


def _union_resolver(case: Case) -> dict[str, object]:
    inputs = case["inputs"]
    parts = [
        SimpleClusterResolver(ClusterSpec(part["cluster"]), **part["kwargs"])
        for part in inputs.get("parts", [])
    ]
    return resolver_fields(UnionResolver(*parts, **inputs.get("kwargs", {})))


def _tfconfig_resolver(case: Case) -> dict[str, object]:
    inputs = case["inputs"]
    text = inputs["TF_CONFIG"]
    environ = {} if text is None else {"TF_CONFIG": text}
    return resolver_fields(TFConfigClusterResolver(**inputs["kwargs"], environ=environ))


def _instantiate_base_resolver(case: Case) -> object:
    return ClusterResolver()  # type: ignore[abstract]


def _expand_hostlist(case: Case) -> dict[str, object]:
    return {"hosts": expand_hostlist(case["inputs"]["hostlist"])}


def _expand_tasks_per_node(case: Case) -> dict[str, object]:
    return {"counts": expand_tasks_per_node(case["inputs"]["tasks_per_node"])}


def _slurm_resolver(case: Case) -> dict[str, object]:
    environ = dict(case["inputs"]["env"])
    resolver = SlurmClusterResolver(**case["inputs"]["kwargs"], environ=environ)

    def task() -> dict[str, object]:
        return {
            "task_type": resolver.task_type,
            "task_id": resolver.task_id,
            "task_info": list(resolver.get_task_info()),
        }

    return {
        "before_cluster_spec": {**task(), "master": probe(resolver.master)},
        "cluster_spec": _plain(resolver.cluster_spec()),
        **task(),
        "master()": probe(resolver.master),
        "master(rpc=http)": probe(lambda: resolver.master(rpc_layer="http")),
        "master(worker,0)": probe(lambda: resolver.master("worker", 0)),
        "num_accelerators": resolver.num_accelerators(),
        "CUDA_VISIBLE_DEVICES": environ.get("CUDA_VISIBLE_DEVICES"),
        "environment": resolver.environment,
        "rpc_layer": resolver.rpc_layer,
    }


def _multi_worker_util(case: Case) -> dict[str, object]:
    inputs = case["inputs"]
    cluster, job, index = inputs["cluster"], inputs["task_type"], inputs["task_id"]
    return {
        "is_chief": probe(lambda: task_roles.is_chief(cluster, job, index)),
        "id_in_cluster": probe(lambda: task_roles.id_in_cluster(cluster, job, index)),
        "worker_count": probe(lambda: task_roles.worker_count(cluster, job)),
        "collective_leader": probe(lambda: task_roles.collective_leader(cluster, job, index)),
        "coordination_leader": probe(lambda: task_roles.coordination_leader(cluster)),
    }


def _normalize_cluster_spec(case: Case) -> object:
    return _plain(task_roles.normalize_cluster_spec(_cluster(case["inputs"]["cluster"])))


def _server_def(case: Case) -> dict[str, object]:
    inputs = case["inputs"]
    server = task_roles.make_server_def(_cluster(inputs["cluster"]), **inputs["kwargs"])
    return {
        "job_name": server.job_name,
        "task_index": server.task_index,
        "protocol": server.protocol,
    }


HANDLERS: dict[str, Callable[[Case], object]] = {
    "cluster_spec": _cluster_spec,
    "simple_resolver": _simple_resolver,
    "simple_resolver_setters": _simple_resolver_setters,
    "union_resolver": _union_resolver,
    "tfconfig_resolver": _tfconfig_resolver,
    "instantiate_base_resolver": _instantiate_base_resolver,
    "expand_hostlist": _expand_hostlist,
    "expand_tasks_per_node": _expand_tasks_per_node,
    "slurm_resolver": _slurm_resolver,
    "multi_worker_util": _multi_worker_util,
    "normalize_cluster_spec": _normalize_cluster_spec,
    "server_def": _server_def,
}
