"""From the recorded value encoding (golden/README.md) to values: arrays as NumPy arrays or as torch tensors."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import torch

import mpistrat as ms

Library = Literal["numpy", "torch"]
LIBRARIES: tuple[Library, ...] = ("numpy", "torch")
_STRUCTURES = ("list", "tuple", "dict", "namedtuple")


def is_array(encoded: Any) -> bool:
    return isinstance(encoded, dict) and set(encoded) == {"dtype", "shape", "data"}


def is_kind(encoded: Any, kind: str) -> bool:
    return isinstance(encoded, dict) and set(encoded) == {kind}


def dtypes(encoded: Any) -> Iterator[str]:
    """Every dtype named anywhere in a case's inputs or expectation."""
    if isinstance(encoded, dict):
        if isinstance(encoded.get("dtype"), str):
            yield encoded["dtype"]
        for child in encoded.values():
            yield from dtypes(child)
    elif isinstance(encoded, list):
        for child in encoded:
            yield from dtypes(child)


def has_dtype(library: Library, dtype: str) -> bool:
    if library == "torch":
        # It has these three, but cannot add them.
        if dtype in ("uint16", "uint32", "uint64"):
            return False
        return isinstance(getattr(torch, dtype, None), torch.dtype)
    return dtype == "string" or dtype in np.sctypeDict


def to_numpy(encoded: dict[str, Any]) -> np.ndarray:
    """An encoded array; bfloat16, which NumPy lacks, as float32."""
    dtype, data = encoded["dtype"], encoded["data"]
    if dtype == "string":
        return np.array(data, dtype=object).reshape(encoded["shape"])
    if dtype == "bfloat16":
        dtype = "float32"
    if dtype.startswith("complex"):
        pairs = np.array(_numbers(data), dtype=np.float64).reshape([*encoded["shape"], 2])
        return (pairs[..., 0] + 1j * pairs[..., 1]).astype(dtype)
    return np.array(_numbers(data), dtype=dtype).reshape(encoded["shape"])


def _numbers(data: Any) -> Any:
    """`data` with the strings "nan", "inf" and "-inf" as numbers."""
    if isinstance(data, list):
        return [_numbers(child) for child in data]
    return float(data) if isinstance(data, str) else data


def array(library: Library, value: Any, dtype: str) -> Any:
    """A fresh array of `value`, so that no two replicas hold the same object by chance."""
    if library == "torch":
        return torch.tensor(np.asarray(value).tolist(), dtype=getattr(torch, dtype))
    return np.array(value, dtype=dtype)


def decode(encoded: Any, library: Library) -> Any:
    """A plain value: everything but the distributed containers, which need a strategy."""
    if is_array(encoded):
        host = to_numpy(encoded)
        if library == "numpy":
            return host
        return torch.from_numpy(host.copy()).to(getattr(torch, encoded["dtype"]))
    if is_kind(encoded, "py"):
        return encoded["py"]
    if is_kind(encoded, "indexed_slices"):
        parts = encoded["indexed_slices"]
        return ms.IndexedSlices(**{name: decode(part, library) for name, part in parts.items()})
    for kind in _STRUCTURES:
        if is_kind(encoded, kind):
            return _structure(kind, encoded[kind], lambda child: decode(child, library))
    if encoded is None or isinstance(encoded, (bool, int, float, str)):
        return encoded
    raise ValueError(f"the driver does not know this encoding: {encoded!r:.200}")


def _structure(kind: str, children: Any, decoded: Callable[[Any], Any]) -> Any:
    if kind == "list":
        return [decoded(child) for child in children]
    if kind == "tuple":
        return tuple(decoded(child) for child in children)
    mapping = {name: decoded(child) for name, child in children.items()}
    if kind == "dict":
        return mapping
    return collections.namedtuple("NT", mapping)(**mapping)
