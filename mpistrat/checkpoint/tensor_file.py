"""Arrays in one file of the safetensors format. Other programs can read it without this package.

The format (https://github.com/huggingface/safetensors): the length of a header, 8 bytes little-endian; the header, a
JSON text, {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}; and the values without gaps. This file
writes the format itself, because a snapshot is one buffer in the order of the file. The arrays are copied into it once,
and another thread computes its checksum and writes it as it is.
"""

from __future__ import annotations

import dataclasses
import json
import math
import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from mpistrat import arrays
from mpistrat.checkpoint.schema import COUNT, check, parsed

_Arrays = Mapping[str, arrays.Array]  # by name
_CODES = {
    **{"bool": "BOOL", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"},
    **{"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64"},
    **{"int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64"},
    **{"uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64"},
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
# The bytes of an element, by code.
_BYTES = {
    **{"BOOL": 1, "I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E5M2": 1},
    **{"I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4},
    **{"I64": 8, "U64": 8, "F64": 8, "C64": 8},
}
_AS_BYTES = "U8"
_ALIGNMENT = 64
_MOST_DIMENSIONS = 64  # the limit of NumPy and of torch
_LENGTH = 8
_METADATA = "__metadata__"
_FOREIGN = "mpistrat"
_NO_BYTES = np.empty(0, np.uint8)


class Snapshot:
    """Copies of arrays in one buffer, in the layout of the file: the header and the values are the file's bytes.

    The constructor copies the arrays. `retake` reuses the layout for a later save, because with many small arrays
    computing the layout takes longer than the copies. Another thread then writes `header` and `values` to the file.

    Args:
        named: NumPy arrays and torch tensors by name, on any device.
        buffer: memory of an earlier snapshot, uint8[n], to be overwritten. If it is too small, new memory is used.
    Attributes:
        header: bytes of the file before the values.
        values: values of all arrays, uint8[n].
    """

    def __init__(self, named: _Arrays, buffer: np.ndarray = _NO_BYTES) -> None:
        entries: dict[str, Any] = {}
        foreign: dict[str, list[Any]] = {}
        places: dict[str, slice] = {}
        end = 0
        for name, array in sorted(named.items(), key=lambda item: _order(item[1])):
            start = end
            end += arrays.num_elements(array) * arrays.itemsize(array)
            places[name] = slice(start, end)
            code = _code(array)
            shape = list(array.shape)
            if code is None:
                code = _AS_BYTES
                shape = [end - start]
                foreign[name] = _described(array)
            entries[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
        if foreign:
            entries[_METADATA] = {_FOREIGN: json.dumps(foreign)}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + _LENGTH) % _ALIGNMENT)
        self.header = len(text).to_bytes(_LENGTH, "little") + text
        if len(buffer) < end:
            buffer = np.empty(end, np.uint8)
        self.buffer = buffer
        self.values = buffer[:end]
        self._alike = _alike(named)
        self._views = [_view(array, self.values[places[name]]) for name, array in named.items()]
        self._copy(named)

    def retake(self, named: _Arrays) -> bool:
        """Copy the arrays in `named` over the earlier copies, if names, kinds, dtypes and shapes are equal.

        Returns: False if one of them differs; then nothing is copied, and the caller makes a new Snapshot.
        """
        if _alike(named) != self._alike:
            return False
        self._copy(named)
        return True

    def _copy(self, named: _Arrays) -> None:
        targets = []
        sources = []
        for view, array in zip(self._views, named.values(), strict=True):
            if view is None:
                continue
            if not arrays.is_torch(array):
                view[...] = array
            elif array.is_cpu:
                targets.append(view)
                sources.append(array)
            else:
                view.copy_(array.detach())
        if targets:
            import torch

            with torch.no_grad():
                torch._foreach_copy_(targets, sources)


def _alike(named: _Arrays) -> list[tuple[Any, ...]]:
    """Return (name, type, dtype, shape) of each array. Equal lists give the same layout in the file."""
    return [(name, type(array), array.dtype, array.shape) for name, array in named.items()]


def _order(array: arrays.Array) -> tuple[bool, int]:
    """Return a sort key that puts arrays with wide elements first, because torch needs aligned elements.

    Arrays of dtypes that only NumPy has, such as strings, come last: their odd widths would shift the arrays after
    them, and NumPy needs no alignment.
    """
    is_of_numpy_alone = _code(array) is None and not arrays.is_torch(array)
    return is_of_numpy_alone, -arrays.itemsize(array)


def _described(array: arrays.Array) -> list[Any]:
    """Return [dtype, shape] of an array whose dtype the format lacks; the file has the array as plain bytes.

    The dtype is torch's name, or `numpy.dtype.str`.
    """
    dtype = arrays.dtype_name(array) if arrays.is_torch(array) else array.dtype.str
    return [dtype, list(array.shape)]


def _code(array: arrays.Array) -> str | None:
    if not arrays.is_torch(array) and not array.dtype.isnative:
        return None
    return _CODES.get(arrays.dtype_name(array))


def _view(array: arrays.Array, place: np.ndarray) -> Any:
    """Return a view of `place` with the dtype and shape of `array`, so that `array` can be copied there.

    Args:
        place: the array's part of the buffer, uint8[bytes].
    Returns: a torch tensor if `array` is one, else a NumPy array; None if `place` is empty.
    """
    if not len(place):
        return None
    if arrays.is_torch(array):
        import torch

        return torch.from_numpy(place).view(array.dtype).view(array.shape)
    return place.view(array.dtype).reshape(array.shape)


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """One array of a checkpoint file that `parse` has read. Its values are a view of the file's bytes in memory.

    Attributes:
        dtype: torch's name of the dtype, or `numpy.dtype.str` if the format has no code for it.
        shape: shape of the array.
        data: the bytes of the values, uint8[n].
    """

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray

    def array(self) -> np.ndarray:
        """Return a NumPy array, a view of `data`. Raises: ValueError or TypeError if NumPy has no such dtype."""
        return self.data.view(_numpy_dtype(self.dtype)).reshape(self.shape)

    def tensor(self) -> Any:
        """Return a torch tensor on the CPU, a view of `data`.

        Raises: ValueError or RuntimeError if this version of torch has no such dtype.
        """
        import torch

        dtype = torch_dtype(self.dtype)
        if not len(self.data):
            return torch.empty(self.shape, dtype=dtype, device="cpu")
        return torch.from_numpy(self.data).view(dtype).view(self.shape)


def torch_dtype(name: str) -> Any:
    """Return the torch dtype of this name. Raises: ValueError if this version of torch has none."""
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this torch has no dtype {name!r:.80}")
    return dtype


def parse(content: np.ndarray) -> dict[str, StoredArray]:
    """Return the arrays of a file, by name. Their data are views of `content`, not copies.

    Args:
        content: the bytes of the file, uint8[n].
    Raises: ValueError if `content` is no safetensors file, if arrays leave gaps, overlap or end outside of it, or if
        their sizes do not fit their shapes.
    """
    start = _LENGTH + int.from_bytes(content[:_LENGTH].tobytes(), "little")
    if not _LENGTH < start <= len(content):
        raise ValueError(f"its header ends at byte {start} of {len(content)}")
    entries = parsed(content[_LENGTH:start].tobytes())
    check(entries, dict, "its header")
    metadata = entries.pop(_METADATA, {})
    check(metadata, {str: str}, _METADATA)
    check(entries, _ENTRIES, "its header")
    foreign = parsed(metadata.get(_FOREIGN, "{}").encode())
    check(foreign, {str: _foreign}, _FOREIGN)
    stored = {}
    end = 0
    in_order = sorted(entries.items(), key=lambda item: item[1]["data_offsets"])
    for name, entry in in_order:
        begin = end
        shape = entry["shape"]
        code = entry["dtype"]
        size = math.prod(shape) * _BYTES[code]
        end += size
        if entry["data_offsets"] != [begin, end]:
            raise ValueError(
                f"{name!r:.80} is at {entry['data_offsets']}: it has {size} bytes, and the next free byte is {begin}"
            )
        dtype = _DTYPES[code]
        if name in foreign:
            dtype, shape = foreign[name]
        data = content[start + begin : start + end]
        stored[name] = StoredArray(dtype, tuple(shape), data)
    if start + end != len(content):
        raise ValueError(f"its arrays end at byte {start + end} of {len(content)}")
    return stored


def _known(code: Any) -> None:
    if code not in _DTYPES:
        raise ValueError(f"no dtype is called {reprlib.repr(code)}")


def _foreign(entry: Any) -> None:
    """Check the dtype and shape of an array whose dtype the format does not have: a result of `_described`."""
    dtype, shape = entry
    check(dtype, str, "its dtype")
    _shape(shape)


def _shape(shape: Any) -> None:
    check(shape, [COUNT], "its shape")
    if len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"it has {len(shape)} dimensions")


_ENTRIES = {str: {"dtype": _known, "shape": _shape, "data_offsets": [COUNT]}}


def _numpy_dtype(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.hasobject or dtype.kind == "V":
        raise ValueError(f"a checkpoint cannot keep arrays of dtype {name!r:.80}")
    return dtype
