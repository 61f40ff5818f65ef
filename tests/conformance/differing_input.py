"""Expectations about input that differences.toml names, computed from a case; encoded as in the recording."""

from __future__ import annotations

from typing import Any

from conformance.encoding import is_array

Case = dict[str, Any]
_OF_ANY_ITERABLE = ("steps", "ended", "next_after_end", "contexts")


def the_dataset_itself(case: Case) -> Any:
    """What can be asked of any iterable."""
    expect = case["expect"]
    seen = {name: expect[name] for name in _OF_ANY_ITERABLE if name in expect}
    return {**seen, "is_dataset": True}


def spec_unknown(case: Case) -> Any:
    expect = case["expect"]
    if "per_worker" in expect:
        return {"per_worker": [{**worker, "element_spec": None} for worker in expect["per_worker"]]}
    return {**expect, "element_spec": None}


def sizes_as_read(case: Case) -> Any:
    """All sizes but the first are those of the first step's arrays, where there is a step."""
    expect = case["expect"]
    if not expect["steps"]:
        return spec_unknown(case)
    shapes = _shapes(expect["steps"][0][0])

    def known(spec: Any, shape: list[int]) -> Any:
        if "per_replica" in spec:
            return {"per_replica": [known(component, shape) for component in spec["per_replica"]]}
        return {**spec, "shape": spec["shape"][:1] + shape[1:]}

    specs = [known(spec, shape) for spec, shape in zip(expect["element_spec"], shapes, strict=True)]
    return {**expect, "element_spec": specs}


def with_the_last_batch(case: Case) -> Any:
    """The first replica gets the rest of a range, and each other replica a batch of no examples."""
    expect, source = case["expect"], case["inputs"]["source"]
    read = sum(batch["shape"][0] for step in expect["steps"] for batch in step)
    rests = [list(range(read, source["n"])), *[[]] * (case["replicas"] - 1)]
    last = [{"dtype": "int64", "shape": [len(rest)], "data": rest} for rest in rests]
    return {**expect, "steps": [*expect["steps"], last]}


def _shapes(encoded: Any) -> list[list[int]]:
    """Of the arrays of a structure, in tf.nest's order."""
    if is_array(encoded):
        return [encoded["shape"]]
    ((kind, parts),) = encoded.items()
    children = [parts[name] for name in sorted(parts)] if kind == "dict" else list(parts)
    return [shape for child in children for shape in _shapes(child)]


def depth_of_batches(ops: list[Any]) -> int:
    """How many batches an element of a dataset is nested in."""
    names = [op[0] for op in ops]
    return names.count("batch") - names.count("unbatch")


def too_few_files_for_all(case: Case) -> Any:
    """InvalidArgumentError wherever something was recorded."""
    ((name, workers),) = case["expect"].items()
    error = {
        "error": "InvalidArgumentError",
        "error_bases": ["OpError", "Exception"],
        "error_strict": True,
    }
    return {name: [error] * len(workers)}
