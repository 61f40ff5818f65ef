"""Combines pieces of memory element by element, with the vector loops of NumPy or torch."""

from __future__ import annotations

import abc
import contextvars
import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import Array, name_of_dtype
from mpistrat.communicators.host_views import bytes_of, view_of
from mpistrat.communicators.reduction import BITWISE

# The dtypes that MPI can reduce. Ranks of one node take only these, too, so that a program also runs on several nodes.
KNOWN_TO_MPI = frozenset(
    ["float32", "float64", "complex64", "complex128"]
    + [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
)
# MPI has no bfloat16 (mpi4py passes it on as bytes, and Open MPI then adds the bytes), and not every MPI has float16.
# Both, and torch's floats of 8 bits, are summed as float32 and rounded once.
SUMMED_AS_FLOAT32 = ("float16", "bfloat16", "float8")
# The dtypes that each operation combines, by the beginning of their names.
_INTEGERS = ("int", "uint")
_REAL = (*_INTEGERS, "float", "bfloat")
_COMBINED = {
    **dict.fromkeys(("sum", "prod"), (*_REAL, "complex")),
    **dict.fromkeys(("max", "min"), _REAL),
    **dict.fromkeys(BITWISE, _INTEGERS),
}
_UFUNCS: dict[str, np.ufunc] = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


class Arithmetic(abc.ABC):
    """Combines pieces of memory, element by element, for one dtype and one operation. `arithmetic_of` makes it.

    `view` turns bytes into a piece, an array of NumPy or torch.

    Attributes: itemsize: bytes of an element.
    """

    itemsize: int

    @abc.abstractmethod
    def view(self, memory: np.ndarray) -> Any:
        """Return the bytes of `memory` as elements of the dtype, without a copy."""

    @abc.abstractmethod
    def elements(self, buffer: Array) -> Any:
        """Return the elements of `buffer`, in its shape and in its own memory."""

    def flat(self, buffer: Array) -> Any:
        """Return the elements of `buffer` as 1-D, in its own memory. Raises: ValueError if it is not C-contiguous."""
        if buffer.__class__ is np.ndarray and buffer.flags.c_contiguous:
            return buffer.reshape(-1)
        return self.view(bytes_of(buffer))

    @abc.abstractmethod
    def totals(self, elements: int) -> Any:
        """Return an uninitialized array of this many elements, for unfinished sums: float32 if the dtype is shorter."""

    @abc.abstractmethod
    def combine(self, pieces: Sequence[Any], out: Any, scale: float | None) -> None:
        """Combine `pieces` (sum, maximum, product, …) in their order, multiply by `scale`, and write into `out`.

        An overflow or a NaN neither warns nor raises, whatever the program's `np.seterr` says, because one rank could
        raise while other ranks wait.

        Args:
            pieces: arrays of equal length; they keep their values, except for `out`.
            out: gets the result; it may be one of `pieces`.
            scale: a factor of the result; None: the result as it is.
        """


@functools.lru_cache
def can_combine(dtype: Any, op: str) -> bool:
    """Whether `arithmetic_of` can combine elements of `dtype`, of NumPy or torch, by `op`."""
    name = name_of_dtype(dtype)
    known = name in KNOWN_TO_MPI or name.startswith(SUMMED_AS_FLOAT32)
    return known and name.startswith(_COMBINED[op]) and getattr(dtype, "isnative", True)


@functools.lru_cache
def arithmetic_of(dtype: Any, op: str) -> Arithmetic:
    """Return the object that combines elements of `dtype` by `op`, one of `OPS`. Raises: TypeError unless it can."""
    name = name_of_dtype(dtype)
    if not can_combine(dtype, op):
        raise TypeError(
            f"{name} cannot be combined by {op!r}; convert it to float32 or float64 first"
        )
    if not name.startswith(SUMMED_AS_FLOAT32):
        return _NumPy(np.dtype(name), op)
    if isinstance(dtype, np.dtype):
        return _Half(dtype, op)
    return _Torch(name, op)


def share_of(
    nbytes: int, itemsize: int, ranks: int, senders: int | None = None
) -> list[tuple[int, int]]:
    """Divide a buffer among ranks, in whole elements and as equally as possible.

    Args:
        nbytes, itemsize: bytes of the buffer and of an element.
        ranks: number of ranks.
        senders: only the first `senders` ranks get a part, and the other parts are empty; None: all ranks.

    Returns: for each rank, in rank order, the index of the first byte of its part, and the index after its last.
    """
    senders = senders or ranks
    elements = nbytes // itemsize
    cuts = [elements * min(i, senders) // senders * itemsize for i in range(ranks + 1)]
    return list(itertools.pairwise(cuts))


class _Quiet(threading.local):
    """For each thread, `call(ufunc, *args, out=out)` calls a ufunc without NumPy's warnings and errors."""

    def __init__(self) -> None:
        self.call: Callable[..., Any] = self._in_errstate
        # Since NumPy 2 its error settings belong to a context, and not to a thread.
        if np.lib.NumpyVersion(np.__version__) >= "2.0.0":
            context = contextvars.Context()  # an empty context keeps no object of the program alive
            context.run(np.seterr, all="ignore")
            self.call = context.run  # takes a fifth of the time of entering np.errstate

    @staticmethod
    def _in_errstate(ufunc: Callable[..., Any], *args: Any, out: Any) -> Any:
        with np.errstate(all="ignore"):
            return ufunc(*args, out=out)


_quiet = _Quiet()


def scale(buffer: Array, factor: float | None) -> None:
    """Multiply `buffer` by `factor` in place, without warnings or errors of NumPy. None leaves `buffer` as it is."""
    if factor is None:
        return
    if isinstance(buffer, np.ndarray):
        _quiet.call(np.multiply, buffer, factor, out=buffer)
    else:
        buffer *= factor


class _NumPy(Arithmetic):
    def __init__(self, dtype: np.dtype[Any], op: str) -> None:
        self._dtype = dtype
        self.itemsize = dtype.itemsize
        self._combine = _UFUNCS[op]

    def view(self, memory: np.ndarray) -> np.ndarray:
        return memory.view(self._dtype)

    def elements(self, buffer: Array) -> np.ndarray:
        return buffer if buffer.__class__ is np.ndarray else view_of(buffer)

    def totals(self, elements: int) -> np.ndarray:
        return np.empty(elements, self._dtype)

    def combine(self, pieces: Sequence[Any], out: Any, scale: float | None) -> None:
        combine = self._combine
        quietly = _quiet.call
        if len(pieces) == 2:
            quietly(combine, pieces[0], pieces[1], out=out)
        elif len(pieces) == 1:
            out[...] = pieces[0]
        else:
            # `out` may be a later piece, so only the last step writes to it.
            total = np.empty_like(pieces[0])
            quietly(combine, pieces[0], pieces[1], out=total)
            for piece in pieces[2:-1]:
                quietly(combine, total, piece, out=total)
            quietly(combine, total, pieces[-1], out=out)
        if scale is not None:
            quietly(np.multiply, out, out.dtype.type(scale), out=out)


class _Half(_NumPy):
    """NumPy's float16."""

    def totals(self, elements: int) -> np.ndarray:
        return np.empty(elements, np.float32)

    def combine(self, pieces: Sequence[Any], out: Any, scale: float | None) -> None:
        with np.errstate(all="ignore"):
            total = pieces[0].astype(np.float32)
            for piece in pieces[1:]:
                self._combine(total, piece, out=total)
            if scale is not None:
                total *= np.float32(scale)
            out[...] = total


class _Torch(Arithmetic):
    """torch's floats of 16 and 8 bits."""

    def __init__(self, dtype: str, op: str) -> None:
        import torch

        self._torch = torch
        self._dtype: torch.dtype = getattr(torch, dtype)
        self.itemsize = self._dtype.itemsize
        self._combine: Any = getattr(torch, _UFUNCS[op].__name__)

    def view(self, memory: np.ndarray) -> Any:
        return self._torch.from_numpy(memory).view(self._dtype)

    def elements(self, buffer: Array) -> Any:
        return buffer.detach()

    def totals(self, elements: int) -> Any:
        return self._torch.empty(elements, dtype=self._torch.float32, device="cpu")

    def combine(self, pieces: Sequence[Any], out: Any, scale: float | None) -> None:
        total = pieces[0].to(self._torch.float32, copy=True)
        for piece in pieces[1:]:
            self._combine(total, piece.float(), out=total)
        if scale is not None:
            total.mul_(scale)
        out.copy_(total)
