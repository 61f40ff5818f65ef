"""A state as JSON and arrays: what `state_dict()` gave comes back bit for bit, types included, and without pickle.

JSON's own values stand for themselves, and lists for lists. All else is an object whose first name is its kind:
{"dict": {"lr": 0.1}}, {"pairs": [[0, …]]} for other keys than strings, {"tuple": [0.9, 0.999]}, {"tensor": "weight"}
for the tensor of that name in a file beside, {"sharded": "weight", "shape": [8, 4], "dtype": "float32"} for one of
which each rank has written a part.
"""

from __future__ import annotations

import base64
import collections
import math
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from mpistrat import arrays
from mpistrat.checkpoint.schema import COUNT, Schema, check
from mpistrat.checkpoint.shards import ShardedArray, unused
from mpistrat.checkpoint.tensor_file import StoredArray

Json = Any

_ITSELF = (type(None), bool, int, str)


class Encoder:
    """Encodes states whose arrays go to one file.

    Attributes:
        arrays: those met so far, by name; on their devices, and not copied.
    """

    def __init__(self) -> None:
        self.arrays: dict[str, arrays.Array] = {}
        self._sharded: set[str] = set()

    def encode(self, value: Any, path: tuple[str, ...] = ()) -> Json:
        """`value` as JSON. Its arrays are named by where they are: "state.0.exp_avg".

        Raises: TypeError for what could come back as something else.
        """
        kind = type(value)
        if kind in _ITSELF:
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if kind is list:
            return self._each(value, path)
        if kind is tuple:
            return {"tuple": self._each(value, path)}
        if kind is dict or kind is collections.Counter or kind is collections.OrderedDict:
            return self._mapping(value, path)
        if kind is bytes:
            return {"bytes": base64.b64encode(value).decode()}
        if kind is complex:
            return {"complex": [self.encode(value.real), self.encode(value.imag)]}
        if arrays.is_sharded(value):
            name = unused(".".join(path), self._sharded)
            self._sharded.add(name)
            dtype = arrays.dtype_name(value)
            return {"sharded": name, "shape": list(value.shape), "dtype": dtype}
        if arrays.is_torch(value):
            return self._array("tensor", value, path)
        if arrays.is_cupy(value):
            return self._array("array", arrays.to_numpy(value), path)
        if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind not in "OV":
            return self._array(
                "array" if isinstance(value, np.ndarray) else "scalar", np.asarray(value), path
            )
        torch = sys.modules.get("torch")
        if torch is not None:
            if kind is torch.Size:
                return {"size": list(value)}
            if kind is torch.dtype:
                return {"dtype": str(value).removeprefix("torch.")}
            if kind is torch.device:
                return {"device": str(value)}
        raise TypeError(
            f"{'.'.join(path) or 'the state'} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot "
            "keep: its state_dict() must be made of dictionaries, lists, tuples, numbers, strings, None and arrays"
        )

    def _each(self, values: Iterable[Any], path: tuple[str, ...]) -> list[Json]:
        return [self.encode(value, (*path, str(i))) for i, value in enumerate(values)]

    def _mapping(self, value: Mapping[Any, Any], path: tuple[str, ...]) -> Json:
        kind = type(value).__name__
        encoded: dict[str, Json]
        if all(type(key) is str for key in value):
            encoded = {"dict": {k: self.encode(v, (*path, k)) for k, v in value.items()}}
        else:
            encoded = {
                "pairs": [
                    [self.encode(k, (*path, "a key")), self.encode(v, (*path, str(k)))]
                    for k, v in value.items()
                ]
            }
        if kind != "dict":
            encoded["of"] = kind
        metadata = getattr(value, "_metadata", None)  # a module's: the versions of its classes
        if metadata is not None:
            encoded["metadata"] = self.encode(metadata, (*path, "_metadata"))
        return encoded

    def _array(self, kind: str, array: arrays.Array, path: tuple[str, ...]) -> Json:
        if kind == "tensor" and (str(array.layout) != "torch.strided" or array.is_meta):
            raise TypeError(
                f"{'.'.join(path)} is a {array.layout} tensor on {array.device}, which a checkpoint cannot keep; "
                "it keeps dense ones that have values"
            )
        name = unused(".".join(path), self.arrays)
        self.arrays[name] = array
        return {kind: name}


def decode(tree: Json, stored: Mapping[str, StoredArray]) -> Any:
    """What was encoded as `tree`, whose arrays are `stored`. The arrays that it returns share their memory.

    Raises: ValueError, TypeError or RuntimeError for what no Encoder has made.
    """
    if isinstance(tree, list):
        return [decode(element, stored) for element in tree]
    if not isinstance(tree, dict):
        return tree
    kind = next(iter(tree), "nothing")
    content: Any = tree.get(kind)
    if kind not in _CONTENTS or not tree.keys() <= {kind, *_ATTRIBUTES.get(kind, ())}:
        raise ValueError(f"an unknown kind of value: {reprlib.repr(tree)}")
    check(content, _CONTENTS[kind], kind)
    if kind in _MAPPING_KINDS:
        return _decoded_mapping(kind, tree, stored)
    if kind == "sharded":
        return _decoded_sharded(tree)
    if kind in ("tensor", "array", "scalar"):
        return _decoded_array(kind, content, stored)
    if kind in ("size", "dtype", "device"):
        return _of_torch(kind, content)
    return _DECODERS[kind](decode(content, stored))


def _of_two(content: Json) -> None:
    check(content, list, "it")
    if len(content) != 2:
        raise ValueError(f"it has {len(content)} parts, not 2")


_MAPPING_KINDS = ("dict", "pairs")
# What may stand beside the name of a kind.
_ATTRIBUTES = {**dict.fromkeys(_MAPPING_KINDS, ("of", "metadata")), "sharded": ("shape", "dtype")}
# What stands under the name of each kind.
_CONTENTS: dict[str, Schema] = {
    **{"dict": dict, "pairs": [_of_two], "tuple": list, "complex": _of_two, "size": [COUNT]},
    **dict.fromkeys(("float", "bytes", "tensor", "array", "scalar", "dtype", "device"), str),
    "sharded": str,
}
_DECODERS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "float": float,
    "complex": lambda parts: complex(*parts),
    "bytes": lambda text: base64.b64decode(text, validate=True),
}
_MAPPINGS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "Counter": lambda items: collections.Counter(dict(items)),
}


def _decoded_array(kind: str, name: str, stored: Mapping[str, StoredArray]) -> Any:
    if name not in stored:
        raise ValueError(f"there is no array {name!r:.80}")
    try:
        if kind == "tensor":
            return stored[name].tensor()
        array = stored[name].array()
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"its array {name!r:.80}: {error}") from None
    if kind == "scalar" and array.ndim:
        raise ValueError(f"its array {name!r:.80}: a scalar of shape {array.shape}")
    return array[... if kind == "array" else ()]


def _decoded_sharded(tree: Json) -> ShardedArray:
    check(tree, {"shape": [COUNT], "dtype": str}, "sharded")
    _of_torch("dtype", tree["dtype"])
    return ShardedArray(tree["sharded"], tuple(tree["shape"]), tree["dtype"])


def _of_torch(kind: str, content: Any) -> Any:
    import torch

    if kind == "size":
        return torch.Size(content)
    if kind == "device":
        return torch.device(content)
    dtype = getattr(torch, content, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this torch has no dtype {content!r:.80}")
    return dtype


def _decoded_mapping(kind: str, tree: Json, stored: Mapping[str, StoredArray]) -> Any:
    pairs = tree[kind].items() if kind == "dict" else tree[kind]
    decoded = [
        (key if kind == "dict" else decode(key, stored), decode(value, stored))
        for key, value in pairs
    ]
    of = tree.get("of", "dict")
    check(of, str, "of")
    if of not in _MAPPINGS:
        raise ValueError(f"an unknown kind of dictionary: {of!r:.80}")
    mapping = _MAPPINGS[of](decoded)
    if "metadata" in tree:
        mapping._metadata = decode(tree["metadata"], stored)
    return mapping
