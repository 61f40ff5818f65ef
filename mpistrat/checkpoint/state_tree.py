"""Encodes a state as JSON and arrays, without pickle. Decoding gives the same bits and the same types.

JSON's own values stand for themselves, and lists for lists. Any other value is an object whose first name is its kind:
{"dict": {"lr": 0.1}}; {"pairs": [[0, …]]} for a dict with keys that are no strings; {"tuple": [0.9, 0.999]}; {"tensor":
"weight"} for the tensor of that name in the file of arrays; {"sharded": "weight", "shape": [8, 4], "dtype": "float32"}
for a sharded tensor, whose parts the ranks have written.
"""

from __future__ import annotations

import base64
import collections
import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mpistrat import arrays
from mpistrat.checkpoint.schema import COUNT, Schema, check
from mpistrat.checkpoint.shards import Path, ShardedArray, unused
from mpistrat.checkpoint.tensor_file import StoredArray, torch_dtype

Json = Any

_ITSELF = (type(None), bool, int, str)


class Encoder:
    """Encodes states whose arrays go to one file.

    Attributes:
        arrays: all arrays so far, by name; on their devices, and not copied.
    """

    def __init__(self) -> None:
        self.arrays: dict[str, arrays.Array] = {}
        self._sharded: set[str] = set()

    def encode(self, value: Any, path: Path = ()) -> Json:
        """Return `value` as JSON data, and add its arrays to `arrays`.

        Args:
            path: the keys that lead to `value` in the state. An array's name is its path: "state.0.exp_avg".
        Raises: TypeError for a value that decoding could not give back equal.
        """
        kind = type(value)
        if kind in _ITSELF:
            return value
        return _ENCODERS.get(kind, Encoder._other)(self, value, path)

    def _float(self, value: float, path: Path) -> Json:
        return value if math.isfinite(value) else {"float": repr(value)}

    def _complex(self, value: complex, path: Path) -> Json:
        return {"complex": self._list([value.real, value.imag], path)}

    def _bytes(self, value: bytes, path: Path) -> Json:
        return {"bytes": base64.b64encode(value).decode()}

    def _list(self, value: list[Any] | tuple[Any, ...], path: Path) -> list[Json]:
        encoded = []
        for i, element in enumerate(value):
            place = (*path, str(i))
            encoded.append(self.encode(element, place))
        return encoded

    def _tuple(self, value: tuple[Any, ...], path: Path) -> Json:
        return {"tuple": self._list(value, path)}

    def _mapping(self, value: Mapping[Any, Any], path: Path) -> Json:
        encoded: dict[str, Json]
        if {type(key) for key in value} <= {str}:
            entries = {key: self.encode(element, (*path, key)) for key, element in value.items()}
            encoded = {"dict": entries}
        else:
            pairs = []
            for key, element in value.items():
                encoded_key = self.encode(key, (*path, "a key"))
                encoded_element = self.encode(element, (*path, str(key)))
                pairs.append([encoded_key, encoded_element])
            encoded = {"pairs": pairs}
        if type(value) is not dict:
            encoded["of"] = type(value).__name__
        # A module's state has the versions of its classes here.
        metadata = getattr(value, "_metadata", None)
        if metadata is not None:
            encoded["metadata"] = self.encode(metadata, (*path, "_metadata"))
        return encoded

    def _other(self, value: Any, path: Path) -> Json:
        """Encode an array, or a value of a class of torch. Raises: TypeError for any other value."""
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if kind in _CLASSES_OF_TORCH:
            name, plain = _CLASSES_OF_TORCH[kind]
            return {name: plain(value)}
        if arrays.is_sharded(value):
            name = unused(".".join(path), self._sharded)
            self._sharded.add(name)
            return {"sharded": name, "shape": list(value.shape), "dtype": arrays.dtype_name(value)}
        if arrays.is_torch(value):
            kind = "tensor"
            if str(value.layout) != "torch.strided" or value.is_meta:
                raise TypeError(
                    f"{'.'.join(path)} is a {value.layout} tensor on {value.device}, which a checkpoint cannot keep; "
                    "it keeps dense tensors that have values"
                )
        elif arrays.is_cupy(value):
            kind = "array"
            value = arrays.to_numpy(value)
        elif isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind not in "OV":
            kind = "array" if isinstance(value, np.ndarray) else "scalar"
            value = np.asarray(arrays.unmasked(value))
        else:
            raise TypeError(
                f"{'.'.join(path) or 'the state'} is a {kind}, which a checkpoint cannot keep: its state_dict() must "
                "be made of dictionaries, lists, tuples, numbers, strings, None and arrays"
            )
        name = unused(".".join(path), self.arrays)
        self.arrays[name] = value
        return {kind: name}


_ENCODERS: dict[type, Callable[[Encoder, Any, Path], Json]] = {
    float: Encoder._float,
    complex: Encoder._complex,
    bytes: Encoder._bytes,
    list: Encoder._list,
    tuple: Encoder._tuple,
    **dict.fromkeys((dict, collections.Counter, collections.OrderedDict), Encoder._mapping),
}
# Values of torch's classes, by the class's name, so that torch is not imported here.
_CLASSES_OF_TORCH: dict[str, tuple[str, Callable[[Any], Json]]] = {
    "torch.Size": ("size", list),
    "torch.dtype": ("dtype", arrays.name_of_dtype),
    "torch.device": ("device", str),
}


def decode(tree: Json, stored: Mapping[str, StoredArray]) -> Any:
    """Return the value that was encoded as `tree`.

    Args:
        tree: JSON data of an Encoder.
        stored: the arrays of the file, by name. The value's arrays share their memory.
    Raises: ValueError, TypeError or RuntimeError for a tree that no Encoder has made.
    """
    if isinstance(tree, list):
        return [decode(element, stored) for element in tree]
    if not isinstance(tree, dict):
        return tree
    kind = next(iter(tree), "nothing")
    content: Any = tree.get(kind)
    names = {kind, *_ATTRIBUTES.get(kind, ())}
    if kind not in _CONTENTS or not tree.keys() <= names:
        raise ValueError(f"an unknown kind of value: {reprlib.repr(tree)}")
    check(content, _CONTENTS[kind], kind)
    if kind in _MAPPING_KINDS:
        return _decoded_mapping(kind, tree, stored)
    if kind == "sharded":
        check(tree, {"shape": [COUNT], "dtype": str}, kind)
        torch_dtype(tree["dtype"])  # raises an error for an unknown name
        return ShardedArray(content, tuple(tree["shape"]), tree["dtype"])
    if kind in _ARRAYS:
        return _decoded_array(kind, content, stored)
    return _DECODERS[kind](decode(content, stored))


def _of_two(content: Json) -> None:
    check(content, list, "it")
    if len(content) != 2:
        raise ValueError(f"it has {len(content)} elements, not 2")


_MAPPING_KINDS = ("dict", "pairs")
# Further names that an encoded value of a kind may have.
_ATTRIBUTES = {**dict.fromkeys(_MAPPING_KINDS, ("of", "metadata")), "sharded": ("shape", "dtype")}
# The schema of the content under the name of each kind.
_CONTENTS: dict[str, Schema] = {
    **{"dict": dict, "pairs": [_of_two], "tuple": list, "complex": _of_two, "size": [COUNT]},
    **dict.fromkeys(("float", "bytes", "tensor", "array", "scalar", "dtype", "device"), str),
    "sharded": str,
}


def _scalar(stored: StoredArray) -> Any:
    array = stored.array()
    if array.ndim:
        raise ValueError(f"a scalar of shape {array.shape}")
    return array[()]


def _complex(numbers: list[float]) -> complex:
    real, imaginary = numbers
    return complex(real, imaginary)


def _size(lengths: list[int]) -> Any:
    import torch

    return torch.Size(lengths)


def _device(name: str) -> Any:
    import torch

    return torch.device(name)


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


_ARRAYS: dict[str, Callable[[StoredArray], Any]] = {
    "tensor": StoredArray.tensor,
    "array": StoredArray.array,
    "scalar": _scalar,
}
_DECODERS: dict[str, Callable[[Any], Any]] = {
    "size": _size,
    "dtype": torch_dtype,
    "device": _device,
    "tuple": tuple,
    "float": float,
    "complex": _complex,
    "bytes": _bytes,
}
_MAPPINGS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "Counter": collections.Counter,
}


def _decoded_array(kind: str, name: str, stored: Mapping[str, StoredArray]) -> Any:
    if name not in stored:
        raise ValueError(f"there is no array {name!r:.80}")
    try:
        return _ARRAYS[kind](stored[name])
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"its array {name!r:.80}: {error}") from None


def _decoded_mapping(kind: str, tree: Json, stored: Mapping[str, StoredArray]) -> Any:
    if kind == "dict":
        items = {key: decode(value, stored) for key, value in tree[kind].items()}
    else:
        pairs = decode(tree[kind], stored)
        items = dict(pairs)
    of = tree.get("of", "dict")
    check(of, str, "of")
    if of not in _MAPPINGS:
        raise ValueError(f"an unknown kind of dictionary: {of!r:.80}")
    mapping = _MAPPINGS[of](items)
    if "metadata" in tree:
        mapping._metadata = decode(tree["metadata"], stored)
    return mapping
