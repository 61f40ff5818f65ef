"""The same functions for arrays of NumPy, torch and CuPy. Importing this file imports neither torch nor CuPy.

`array_api_compat` has the arithmetic. This file decides which Python values count as arrays, names dtypes alike for all
libraries, and copies arrays between devices and host memory.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol

import array_api_compat as api
import numpy as np

_NUMBERS = (bool, int, float, complex)
# Integers that are added up in int64. Other unsigned integers are often checksums: they wrap around rightly.
_NARROW = frozenset(["int8", "int16", "int32", "uint8"])

Array = Any  # np.ndarray | np.generic | torch.Tensor | cupy.ndarray


class DeviceKind(Protocol):
    """Copies tensors to and from devices of one kind, such as XLA, in place of torch's own copies."""

    def put(self, tensors: Sequence[Any], device: Any) -> list[Any]:
        """Return copies on `device`, a device of this kind, of `tensors` in host memory."""

    def fetch(self, tensors: Sequence[Any]) -> list[Any]:
        """Return copies in host memory of `tensors` on devices of this kind."""


# The device kinds by torch's name of the kind. `mpistrat.xla` adds "xla" when the process first uses an XLA device.
device_kinds: dict[str, DeviceKind] = {}


def is_torch(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_nested(array: Array) -> bool:
    """Whether `array` is a nested tensor of torch. Such a tensor may have no `shape`."""
    return is_torch(array) and array.is_nested


def is_module(value: object) -> bool:
    return isinstance(value, _class_in("torch.nn", "Module"))


def _class_in(module: str, name: str) -> Any:
    """Return the class `name` of a module; () if the module is not loaded, because nothing is an instance of ()."""
    return getattr(sys.modules.get(module), name, ())


def gradients_are_on() -> bool:
    """Whether autograd records operations on this thread; False if torch is not loaded."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.is_grad_enabled()


def default_device() -> AbstractContextManager[object]:
    """Return a context that gives another thread the default device of this thread (`torch.set_default_device`).

    This thread calls the function; a thread that loads examples for it enters the context.

    Returns: the torch.device, because it is such a context. A context without effect if torch is not loaded, or if the
        default device is the CPU or an XLA device: two threads would record into one XLA graph.
    """
    device: Any = None
    with suppress(KeyError, AttributeError):  # torch 2.9: after set_default_device(None)
        device = sys.modules["torch"].get_default_device()
    if getattr(device, "type", "cpu") in ("cpu", "xla"):
        return nullcontext()
    return device


def is_sharded(value: object) -> bool:
    """Whether `value` is a torch DTensor: a tensor that is split over ranks."""
    return isinstance(value, _class_in("torch.distributed.tensor", "DTensor"))


def is_cupy(value: object) -> bool:
    return isinstance(value, _class_in("cupy", "ndarray"))


def is_on_gpu(array: Array) -> bool:
    """Whether `array` is in the memory of an accelerator with streams: CuPy's, or any device of torch except XLA's."""
    return is_on_accelerator(array) and not is_on_xla(array)


def is_on_xla(array: Array) -> bool:
    return is_torch(array) and not array.is_cpu and array.device.type == "xla"


def is_on_accelerator(array: Array) -> bool:
    """Whether `array` is in the memory of a GPU or an XLA device, and not in host memory."""
    if array.__class__ is np.ndarray:
        return False
    if is_torch(array):
        return not (array.is_cpu or array.is_meta)
    return is_cupy(array)


def is_array(value: object) -> bool:
    is_numpy = isinstance(value, (np.ndarray, np.generic))
    return is_numpy or is_torch(value) or is_cupy(value)


def is_number(value: object) -> bool:
    """Whether `value` is a Python number. False for NumPy's scalars, also for np.float64, a subclass of float."""
    return isinstance(value, _NUMBERS) and not isinstance(value, np.generic)


def unmasked(value: Any) -> Any:
    """Return `value` itself. Raises: TypeError for a masked array of NumPy: a copy elsewhere would lose the mask."""
    if isinstance(value, _class_in("numpy.ma", "MaskedArray")):
        masked = np.ma.count_masked(value)
        raise TypeError(
            f"got a masked array, {described(value)} with {masked} masked, and its mask would be "
            "lost: expected an array without a mask. Pass array.filled(number), or the data and the mask as two arrays"
        )
    return value


def as_array(value: Any) -> Array:
    """Return `value` itself if it is an array; else a NumPy array of the number, or of the list or tuple of numbers.

    Python floats become float64, see `as_operand`.

    Raises: TypeError if `value` is a masked array, or neither an array nor numbers.
    """
    if is_array(value):
        return unmasked(value)
    if is_number(value) or isinstance(value, (list, tuple)):
        array = np.asarray(value)
        if array.dtype.kind in "biufc":
            return array
    raise TypeError(f"expected an array or a number, got {type(value).__name__}: {value!r:.80}")


def as_operand(value: Any) -> Array:
    """Return `value` as an array by `as_array`, but make float32 of Python floats, as tf.distribute and torch do."""
    array = as_array(value)
    if array is not value and array.dtype.kind == "f":  # made of Python floats
        return array.astype(np.float32)
    return array


def dtype_name(array: Array) -> str:
    """The dtype's name as all libraries spell it: "float32", "bfloat16", "int64", "bool"."""
    return name_of_dtype(array.dtype)


def described(array: Array) -> str:
    """Return the dtype and shape of `array` for a message, such as "float32[64,1,8,8]"."""
    sizes = ",".join([str(size) for size in array.shape])
    return f"{dtype_name(array)}[{sizes}]"


@functools.cache
def name_of_dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_like(name: str, like: Array) -> Any:
    """Return the dtype called `name` in the library of the array `like`: a torch.dtype or an np.dtype."""
    if is_torch(like):
        import torch

        return getattr(torch, name)
    return np.dtype(name)


@functools.cache
def numpy_knows(dtype: Any) -> bool:
    """Whether tensors of `dtype` can become NumPy arrays; False for bfloat16 and 8-bit floats."""
    return hasattr(np, name_of_dtype(dtype)) or name_of_dtype(dtype) == "bool"


def itemsize(array: Array) -> int:
    return int(array.dtype.itemsize)


def itemsize_of(dtype: Any) -> int | None:
    """Return the number of bytes of one element of `dtype`, a name or a dtype of any library.

    Returns: None for texts and Python objects.
    """
    if isinstance(dtype, str) and dtype == "string":
        return None
    try:
        known = np.dtype(dtype)
    except TypeError:  # a dtype of torch, or the name of a dtype that NumPy lacks
        import torch

        if isinstance(dtype, str):
            dtype = getattr(torch, dtype)
        return dtype.itemsize
    return known.itemsize if known.kind in "biufcV" else None


def num_elements(array: Array) -> int:
    if is_torch(array):
        return int(array.numel())
    return int(array.size)


def is_floating(array: Array) -> bool:
    if is_torch(array):
        return array.dtype.is_floating_point
    return array.dtype.kind == "f"


def is_integer(array: Array) -> bool:
    return dtype_name(array).startswith(("int", "uint"))


@functools.cache
def is_narrow(dtype: Any) -> bool:
    """Whether integers of `dtype` are added up in int64, because a small sum exceeds the range of `dtype`."""
    return name_of_dtype(dtype) in _NARROW


def is_bool(array: Array) -> bool:
    return dtype_name(array) == "bool"


def detach(array: Array) -> Array:
    """Return a tensor over the memory of `array` that is detached from autograd; a NumPy or CuPy array itself."""
    if is_torch(array):
        return array.detach()
    return array


def detach_read(value: Any) -> Any:
    """Return the value of a variable (by its `read_value`), or `value` itself. A tensor is returned as by `detach`."""
    if hasattr(value, "read_value"):
        value = value.read_value()
    return detach(value)


def copy(array: Array) -> Array:
    """Return a new, contiguous copy of `array`, detached from autograd."""
    if is_torch(array):
        import torch

        return array.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(array, np.generic):
        return np.array(array)
    return array.copy()


def zeros(shape: Sequence[int], like: Array) -> Array:
    """Return an array of zeros of `shape`, with the library, dtype and device of `like`."""
    xp = api.array_namespace(like)
    return xp.zeros(tuple(shape), dtype=like.dtype, device=api.device(like))


def cast(array: Array, dtype: Any) -> Array:
    """Return `array` converted to `dtype`, a dtype's name or a dtype of the array's library.

    Raises: TypeError if the array's library has no such dtype.
    """
    xp = api.array_namespace(array)
    try:
        wanted = getattr(xp, dtype) if isinstance(dtype, str) else dtype
        return xp.astype(array, wanted)
    except (AttributeError, TypeError):
        library = "torch" if is_torch(array) else "NumPy"
        raise TypeError(f"{dtype!r:.60} is not a dtype of {library}, the array's library") from None


def as_tensor(value: Any) -> Any:
    """Return `value` as a tensor on its device, or on the CPU if it has none; never on torch's default device.

    A tensor is returned itself; the tensor of an array shares the array's memory.
    """
    import torch

    return torch.as_tensor(unmasked(value), device=getattr(value, "device", "cpu"))


def cast_like(array: Array, like: Array) -> Array:
    """Return `array` converted to the library, dtype and device of `like`, so that a NumPy array may become a tensor.

    The result shares the memory of `array` if nothing need be converted.
    """
    if is_torch(like):
        return as_tensor(array).to(like)
    if is_cupy(like):
        import cupy

        return cupy.asarray(array, dtype=like.dtype)
    return to_numpy(array).astype(like.dtype, copy=False)


def scatter(array: Array, indices: Array, rows: Array, combine: str) -> Array:
    """Return a copy of `array` in which `scatter_into` has combined the rows at `indices` with `rows`.

    `array` stays unchanged.
    """
    result = copy(array)
    scatter_into(result, indices, rows, combine)
    return result


_UFUNCS = {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "div": "divide",
    "min": "minimum",
    "max": "maximum",
}


def scatter_into(result: Array, indices: Array, rows: Array, combine: str) -> None:
    """Combine row `indices[i]` of `result` with `rows[i]`, for each i, in place. A repeated index counts each time.

    Args:
        indices: integer array of shape [rows].
        rows: array or variable of shape [rows, ...], of any library; it is converted to the dtype of `result`.
        combine: "add", "sub", "mul", "div", "min", "max" or "update". "update" replaces the row; of the rows with a
            repeated index any one may stay. "div" rounds the quotients of integers toward zero, as TensorFlow does.
    Raises: KeyError for another `combine`; ZeroDivisionError for integers that are divided by 0.
    """
    rows = cast_like(detach_read(rows), result)
    if combine == "div" and is_integer(result):
        _divide_integers(result, to_numpy(indices), rows)
        return
    if is_torch(result):
        import torch

        index = torch.as_tensor(indices, device=result.device).to(torch.int64)
        if combine == "update":
            result[index] = rows
        elif alpha := {"add": 1, "sub": -1}.get(combine):
            result.index_add_(0, index, rows, alpha=alpha)
        else:
            reduction = {"mul": "prod", "div": "prod", "min": "amin", "max": "amax"}[combine]
            others = [1] * (rows.ndim - 1)
            index = index.view(-1, *others).expand_as(rows)
            if combine == "div":
                rows = 1 / rows
            result.scatter_reduce_(0, index, rows, reduction)
        return
    places = to_numpy(indices)
    if combine == "update":
        result[places] = rows
        return
    ufunc = getattr(api.array_namespace(result), _UFUNCS[combine])
    if len(np.unique(places)) == len(places):  # without repeated indices, several times as fast
        result[places] = ufunc(result[places], rows)
    else:
        ufunc.at(result, places, rows)


def _divide_integers(result: Array, places: np.ndarray, rows: Array) -> None:
    if (rows == 0).any():
        raise ZeroDivisionError("scatter_div divides integers by 0: give divisors without 0")
    while len(places):  # a place that comes several times is divided once in each round
        found, firsts = np.unique(places, return_index=True)
        dividends = result[found]
        divisors = rows[firsts]
        quotients = dividends // divisors
        are_too_low = (quotients < 0) & (quotients * divisors != dividends)
        result[found] = quotients + are_too_low
        rest = np.delete(np.arange(len(places)), firsts)
        places = places[rest]
        rows = rows[rest]


def check_axes(array: Array, axis: int | Sequence[int]) -> tuple[int, ...]:
    """Return `axis` (an integer, or a list or tuple of them) as a tuple of axes counted from the first, 0.

    Raises: ValueError if an axis is no integer, or is out of range for `array`.
    """
    axes = tuple(axis) if isinstance(axis, (list, tuple)) else (axis,)
    for axis_ in axes:
        if isinstance(axis_, bool) or not isinstance(axis_, (int, np.integer)):
            raise ValueError(f"axis must be an integer or a list of integers, got {axis!r:.60}")
        if not -array.ndim <= axis_ < array.ndim:
            raise ValueError(
                f"axis {axis_} is out of range for an array of shape {tuple(array.shape)}"
            )
    return tuple(int(axis_) % array.ndim for axis_ in axes)


def sum_over(array: Array, axes: tuple[int, ...]) -> Array:
    """Return the sum of `array` over `axes`: int64 for narrow integers (see `is_narrow`), else in the array's dtype.

    Raises: TypeError if `array` has booleans.
    """
    if is_bool(array):
        raise TypeError(f"cannot sum booleans (shape {tuple(array.shape)}); cast to an integer")
    dtype = array.dtype
    if is_narrow(dtype):
        dtype = dtype_like("int64", array)
    return api.array_namespace(array).sum(array, axis=axes, dtype=dtype)


def count_over(array: Array, axes: tuple[int, ...]) -> np.ndarray:
    """Return the number of elements that `sum_over(array, axes)` adds for one element of its result.

    Returns: an int64 array of NumPy of shape [], so that the ranks can add their numbers for a mean.
    """
    lengths = [array.shape[axis] for axis in axes]
    return np.asarray(np.prod(lengths, dtype=np.int64))


def concatenate(arrays: Sequence[Array], axis: int = 0) -> Array:
    """Return `arrays`, of one library, joined along `axis`; the result is on the device of the first array."""
    return api.array_namespace(arrays[0]).concat(on_one_device(arrays), axis=axis)


def on_one_device(values: Sequence[Array]) -> list[Array]:
    """Return `values`, of one library, in the same order on the device of the first; copy the others to this device.

    The streams of both devices order each copy, so no caller need wait for it. IndexedSlices stay on their device.
    """
    first = values[0]
    if is_torch(first):
        return [v.to(first.device) if is_torch(v) else v for v in values]
    if is_cupy(first):
        import cupy

        with first.device:
            return [cupy.asarray(v) if is_cupy(v) else v for v in values]
    return list(values)


def flipped(array: Array) -> Array:
    """Return `array` in reverse order along the first axis."""
    return api.array_namespace(array).flip(array, axis=0)


def true_divide(array: Array, divisor: Any) -> Array:
    """Return `array / divisor` as floats. Integers of at most 16 bits give float32, wider integers float64.

    0 / 0 is NaN, without a warning.
    """
    if is_integer(array):
        dtype = "float64" if itemsize(array) > 2 else "float32"
        array = cast(array, dtype)
    with np.errstate(all="ignore"):  # 0 / 0 is the mean of no elements: NaN, without a warning
        if isinstance(array, (np.ndarray, np.generic)):
            divisor = np.asarray(divisor, array.dtype)
        return array / divisor


def to_host(array: Array) -> Array:
    """Return `array` in host memory, C-contiguous and detached from autograd: a tensor, else a NumPy array.

    Returns: an array over the memory of `array` if that is in host memory and contiguous; else a copy, complete on
        return.
    """
    if array.__class__ is np.ndarray:
        return np.asarray(array, order="C")
    if is_torch(array):
        lazy = array.requires_grad or array.is_conj() or array.is_neg()
        if array.is_cpu and not lazy and array.is_contiguous():
            return array
        kind = device_kinds.get(array.device.type)
        if kind is not None:
            return kind.fetch([array.detach()])[0]
        return array.detach().cpu().contiguous().resolve_conj().resolve_neg()
    if is_cupy(array):
        return array.get()
    return np.asarray(unmasked(array), order="C")


def to_numpy(array: Array) -> np.ndarray:
    """Return `array` as a NumPy array, only for reading, because it may share the memory of `array`.

    NumPy lacks bfloat16, so bfloat16 becomes float32.
    """
    host = to_host(array)
    if not is_torch(host):
        return host
    if dtype_name(host) == "bfloat16":
        host = host.float()
    return host.numpy()


def to_device_of(array: Array, like: Array) -> Array:
    """Return `array` on the device and in the library of `like`. `array` must be in host memory.

    Returns: `array` itself if `like` is in host memory; else a copy that the current stream may still be making.
    """
    if is_torch(like):
        return array.to(like.device, non_blocking=True)
    if is_cupy(like):
        import cupy

        return cupy.asarray(array)
    return array


def to_device(array: Array, device: str) -> Array:
    """Return `array` on `device` ("cpu", "cuda:1", "xla:0", …) if it is a tensor; else return `array` itself.

    A tensor that is on `device` already is returned itself. "cpu:0" and "cpu:1" name replicas that share host memory. A
    copy from pinned memory to a GPU runs on the current stream; this function does not wait for it.
    """
    if not is_torch(array):
        return array
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return to_host(array) if is_on_xla(array) else array.to("cpu")
    if kind in device_kinds and array.device.type == "cpu":
        return device_kinds[kind].put([array], device)[0]
    return array.to(f"{kind}:{index or 0}", non_blocking=True)
