"""Expectations that differences.toml names, computed from a case; encoded as in the recording."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from conformance.encoding import is_array, is_kind, to_numpy

Case = dict[str, Any]


def numbers_per_replica(case: Case) -> Any:
    """Every Python number that `run` returned is wrapped, one for each replica."""
    expect, n = case["expect"], case["replicas"]
    wrapped = dict(expect)
    if "result" in expect:
        wrapped["result"] = _wrap(expect["result"], n)
    if len(expect["local_results"]) == 1:
        wrapped["local_results"] = expect["local_results"] * n
    return wrapped


def _wrap(encoded: Any, n: int) -> Any:
    if is_kind(encoded, "py") and not isinstance(encoded["py"], str):
        return {"per_replica": [encoded] * n}
    if is_array(encoded) or is_kind(encoded, "per_replica"):
        return encoded
    return _map(encoded, lambda child: _wrap(child, n))


def numbers_as_per_replica_types(case: Case) -> Any:
    """The name of the class that a merge function sees in the place of a Python number."""

    def types(encoded: Any) -> Any:
        return "PerReplica" if encoded == "int" else _map(encoded, types)

    return types(case["expect"])


def replica_ids_as_numbers(case: Case) -> Any:
    """Replica ids, which TensorFlow gives as int32 scalars, as Python numbers."""

    def numbers(encoded: Any) -> Any:
        if is_array(encoded) and encoded["dtype"] == "int32" and encoded["shape"] == []:
            return {"py": encoded["data"]}
        return "int" if encoded == "EagerTensor" else _map(encoded, numbers)

    return numbers(case["expect"])


def text_names_this_package(case: Case) -> Any:
    text = case["expect"]["py"]
    return {"py": text.replace("tf.distribute.", "mpistrat.", 1)}


def batch_of_all_replicas(case: Case) -> Any:
    """Each value's sum or mean over all replicas, on every replica."""
    totals = [_reduced(case, values) for values in case["inputs"]["values"]]
    n = case["replicas"]
    return {"results": [{"type": "Mirrored", "components": [total] * n} for total in totals]}


def all_reduced(case: Case) -> Any:
    """The sum or mean over replicas of every leaf: arrays, and Python numbers as such."""
    total = _reduced(case, case["inputs"]["values"])
    return {"per_replica": [total] * case["replicas"]}


def reduced_over_axis(case: Case) -> Any:
    """Every leaf summed or averaged over replicas and the recorded axis, or axes."""
    axis = case["program"]["axis"]
    axes = tuple(axis) if isinstance(axis, list) else axis

    def combine(leaves: Sequence[Any]) -> Any:
        parts = [to_numpy(leaf) for leaf in leaves]
        total = sum(part.sum(axes, dtype=part.dtype) for part in parts)
        if case["program"]["reduce_op"].upper() == "SUM":
            return _encode(np.asarray(total, parts[0].dtype))
        elements = sum(part.size for part in parts) // np.size(total)
        return _encode(_divided(np.asarray(total, parts[0].dtype), elements))

    return {"value": _zip(case["inputs"]["values"], combine)}


def concatenated(case: Case) -> Any:
    """The replicas' arrays one after the other along a negative axis; what was recorded if out of range."""
    axis, values = case["program"]["axis"], [to_numpy(v) for v in case["inputs"]["values"]]
    if not -values[0].ndim <= axis:
        return case["expect"]
    joined = _encode(np.concatenate(values, axis))
    if case["program"]["op"] == "all_gather":
        return {"per_replica": [joined] * case["replicas"]}
    return {"value": joined}


def gathered_leaf_by_leaf(case: Case) -> Any:
    joined = np.concatenate(
        [to_numpy(v) for v in case["inputs"]["values"]], case["program"]["axis"]
    )
    return {"value": {"list": [_encode(joined), _encode(joined)]}}


def sum_of_operands(case: Case) -> Any:
    """Replica r passes 1 + r; all of them get the sum."""
    n = case["replicas"]
    total = {"dtype": "float32", "shape": [], "data": n * (n + 1) / 2}
    return {"per_replica": [total] * n}


def operand_unchanged(case: Case) -> Any:
    return {"value": case["inputs"]["value"]}


def broadcast_operand(case: Case) -> Any:
    value = case["inputs"]["value"]
    kind = type(value["py"]).__name__ if is_kind(value, "py") else "EagerTensor"
    return {"type": kind, "value": value}


def applied_without_reading_back(case: Case) -> Any:
    """The write counts, and nothing is returned; where the write itself failed, what was recorded."""
    after = case["expect"]["state_after"]
    written = any(to_numpy(c).tolist() != case["inputs"]["init"] for c in after["components"])
    return {"returned": None, **after} if written else case["expect"]


def first_replica_of_all_workers(case: Case) -> Any:
    """Updates (ON_WRITE) or reads (ON_READ) take what the first replica of the first worker has."""
    workers = case["expect"]["per_worker"]
    first = workers[0]
    seen = [{**worker, "cross_read": first["cross_read"]} for worker in workers]
    if case["program"]["synchronization"] != "ON_READ":
        seen = [{**worker, "components": first["components"]} for worker in seen]
    return {"per_worker": seen}


def rejected_without_change(case: Case) -> Any:
    """ValueError, and every copy keeps the initial value."""
    initial = _encode(np.asarray(case["inputs"]["init"], case["program"]["dtype"]))
    n = case["replicas"]
    state = {
        "components": [initial] * n,
        "cross_read": {"ok": initial},
        "replica_read": {"ok": [initial] * n},
    }
    error = {"error": "ValueError", "error_bases": [], "error_strict": True}
    return {**error, "state_after": state}


def _map(encoded: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(encoded, dict):
        return {name: function(child) for name, child in encoded.items()}
    if isinstance(encoded, list):
        return [function(child) for child in encoded]
    return encoded


def _zip(trees: Sequence[Any], combine: Callable[[Sequence[Any]], Any]) -> Any:
    """Trees of equal structure as one, `combine` applied to the leaves of each place."""
    first = trees[0]
    if is_array(first) or is_kind(first, "py"):
        return combine(trees)
    if isinstance(first, dict):
        return {name: _zip([tree[name] for tree in trees], combine) for name in first}
    return [_zip(parts, combine) for parts in zip(*trees, strict=True)]


def _reduced(case: Case, trees: Sequence[Any]) -> Any:
    mean = case["program"]["reduce_op"].upper() == "MEAN"

    def combine(leaves: Sequence[Any]) -> Any:
        if is_kind(leaves[0], "py"):
            number = sum(leaf["py"] for leaf in leaves)
            return {"py": number / len(leaves) if mean else number}
        arrays = [to_numpy(leaf) for leaf in leaves]
        total = np.sum(arrays, axis=0, dtype=arrays[0].dtype)
        return _encode(_divided(total, len(leaves)) if mean else total)

    return _zip(trees, combine)


def _divided(total: np.ndarray, count: int) -> np.ndarray:
    """True division: integers become float64, those of 16 bits or fewer float32."""
    if total.dtype.kind in "iu":
        total = total.astype("float32" if total.dtype.itemsize < 4 else "float64")
    return np.asarray(total / total.dtype.type(count))


def _encode(array: np.ndarray) -> dict[str, Any]:
    return {"dtype": str(array.dtype), "shape": list(array.shape), "data": array.tolist()}


def rows_in_order_of_indices(case: Case) -> Any:
    """The rows that TensorFlow gives shard by shard, in the order of the indices."""
    ends = np.cumsum(case["inputs"]["shard_lengths"])
    owners = np.searchsorted(ends, case["inputs"]["indices"], side="right")
    places = np.argsort(np.argsort(owners, kind="stable"))
    return {"value": _encode(to_numpy(case["expect"]["value"])[places])}


def devices_of_ranks(case: Case) -> Any:
    """The worker's own, and the servers."""
    servers = range(case["program"]["ps"])
    return {
        **case["expect"],
        "worker_devices": ["cpu:0"],
        "parameter_devices": [f"/job:ps/replica:0/task:{task}/device:CPU:0" for task in servers],
    }


def unsplit_is_a_plain_variable(case: Case) -> Any:
    return {**case["expect"], "len1_type": "Variable"}
