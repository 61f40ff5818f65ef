"""Whether a value is the recorded one."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import mpistrat as ms
from conformance.encoding import is_array, is_kind, to_numpy
from conformance.outcomes import Failed, check_error

# Sums may be added in another order than TensorFlow added them.
_RELATIVE = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 2e-6, "complex64": 2e-6}
_CONTAINERS = {
    "per_replica": ms.PerReplica,
    "mirrored": ms.Mirrored,
    "dist_variable": ms.DistributedValues,
}


def check(expected: Any, actual: Any, at: str = "result") -> None:
    """Raise AssertionError, naming the place, unless `actual` is what `expected` encodes."""
    if isinstance(expected, dict) and "error" in expected:
        assert isinstance(actual, Failed), f"{at}: expected {expected['error']}, got {actual!r}"
        check_error(expected, actual.error)
        if "state_after" in expected:
            check(expected["state_after"], actual.state_after, f"{at}, state after the error")
    elif isinstance(actual, Failed):
        raise AssertionError(f"{at}: expected {expected!r:.300}") from actual.error
    elif is_array(expected):
        _check_array(expected, actual, at)
    elif is_kind(expected, "py"):
        _check_scalar(expected["py"], actual, at)
    elif is_kind(expected, "indexed_slices"):
        assert isinstance(actual, ms.IndexedSlices), f"{at}: expected IndexedSlices, got {actual!r}"
        for name, part in expected["indexed_slices"].items():
            _check_slices_part(name, part, getattr(actual, name), f"{at}.{name}")
    elif is_kind(expected, "variable"):
        check(expected["variable"], read(actual), at)
    elif _is_container(expected, actual):
        ((kind, parts),) = expected.items()
        assert isinstance(actual, _CONTAINERS[kind]), f"{at}: expected {kind}, got {actual!r}"
        _check_sequence(parts, [read(part) for part in actual.values], at)
    elif is_kind(expected, "list") or is_kind(expected, "tuple"):
        ((kind, parts),) = expected.items()
        wanted = list if kind == "list" else tuple
        assert type(actual) is wanted, f"{at}: expected a {kind}, got {actual!r}"
        _check_sequence(parts, actual, at)
    elif is_kind(expected, "namedtuple"):
        assert hasattr(actual, "_fields"), f"{at}: expected a namedtuple, got {actual!r}"
        _check_mapping(expected["namedtuple"], actual._asdict(), at)
    elif is_kind(expected, "dict"):
        _check_mapping(expected["dict"], actual, at)
    elif isinstance(expected, dict):
        _check_mapping(expected, actual, at)
    elif isinstance(expected, list):
        assert isinstance(actual, (list, tuple)), f"{at}: expected {expected!r}, got {actual!r}"
        _check_sequence(expected, actual, at)
    else:
        _check_plain(expected, actual, at)


def _is_container(expected: Any, actual: Any) -> bool:
    """Whether `expected` encodes a distributed value, not a mapping with a field of that name."""
    named = isinstance(expected, dict) and len(expected) == 1 and set(expected) <= set(_CONTAINERS)
    return named and not isinstance(actual, Mapping)


def read(value: Any) -> Any:
    """The array that a variable, or a component of one, holds."""
    return value.read_value() if isinstance(value, ms.Variable) else value


def _check_sequence(expected: list[Any], actual: Any, at: str) -> None:
    assert len(expected) == len(actual), f"{at}: expected {len(expected)} items, got {actual!r}"
    for i, (wanted, found) in enumerate(zip(expected, actual, strict=True)):
        check(wanted, found, f"{at}[{i}]")


def _check_mapping(expected: dict[str, Any], actual: Any, at: str) -> None:
    assert isinstance(actual, Mapping), f"{at}: expected {expected!r:.300}, got {actual!r}"
    assert set(expected) == set(actual), f"{at}: expected keys {set(expected)}, got {set(actual)}"
    for name, wanted in expected.items():
        check(wanted, actual[name], f"{at}.{name}")


def _check_array(expected: dict[str, Any], actual: Any, at: str) -> None:
    arrays = (np.ndarray, np.generic, torch.Tensor)
    assert isinstance(actual, arrays), f"{at}: expected an array, got {type(actual)}: {actual!r}"
    dtype, shape = str(actual.dtype).removeprefix("torch."), list(actual.shape)
    if expected["dtype"] == "string":
        assert dtype == "object" or dtype.startswith("<U"), f"{at}: expected text, got {dtype}"
    else:
        assert dtype == expected["dtype"], f"{at}: expected {expected['dtype']}, got {dtype}"
    assert shape == expected["shape"], f"{at}: expected shape {expected['shape']}, got {shape}"
    if isinstance(actual, torch.Tensor):
        actual = actual.detach().cpu()
        actual = (actual.float() if dtype == "bfloat16" else actual).numpy()
    wanted = to_numpy(expected)
    if dtype in ("object", "bool") or dtype.startswith(("int", "uint", "<U")):
        same = np.array_equal(wanted, actual)
    else:
        relative = _RELATIVE.get(dtype, 1e-12)
        same = np.allclose(wanted, actual, rtol=relative, atol=relative, equal_nan=True)
    assert same, f"{at}: expected {wanted!r}, got {actual!r}"


def _check_slices_part(name: str, expected: Any, actual: Any, at: str) -> None:
    """A dense shape may be any sequence of numbers; rows and positions are arrays."""
    if name == "dense_shape" and expected is not None:
        assert actual is not None, f"{at}: expected {expected['data']}, got None"
        sizes = [int(size) for size in actual]
        assert sizes == expected["data"], f"{at}: expected {expected['data']}, got {sizes}"
    else:
        check(expected, actual, at)


def _check_scalar(expected: Any, actual: Any, at: str) -> None:
    actual = actual.name if isinstance(actual, enum.Enum) else actual
    assert type(actual) is type(expected), f"{at}: expected {expected!r}, got {actual!r}"
    assert actual == expected, f"{at}: expected {expected!r}, got {actual!r}"


def _check_plain(expected: Any, actual: Any, at: str) -> None:
    """Bare JSON. Names of replica context classes stand for any replica context."""
    if isinstance(expected, str) and expected.endswith("ReplicaContext"):
        ours = isinstance(actual, ms.ReplicaContext)
        assert ours, f"{at}: expected a replica context, got {actual!r}"
        return
    actual = actual.name if isinstance(actual, enum.Enum) else actual
    assert actual == expected, f"{at}: expected {expected!r}, got {actual!r}"
