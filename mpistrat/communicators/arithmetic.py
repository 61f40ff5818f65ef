"""Combining pieces of memory element by element, by NumPy's or torch's vector loops."""

from __future__ import annotations

import abc
import functools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

# Summed as float32 and rounded once.
_SHORT_FLOATS = ("float16", "bfloat16", "float8")


class Arithmetic(abc.ABC):
    """Of one dtype and operation. Pieces are what `view` made."""

    itemsize: int

    @abc.abstractmethod
    def view(self, memory: np.ndarray) -> Any:
        """Bytes as elements."""

    @abc.abstractmethod
    def totals(self, elements: int) -> Any:
        """Memory for what is to be combined further, uninitialized: float32 where the dtype is a shorter float."""

    @abc.abstractmethod
    def combine(self, pieces: Sequence[Any], out: Any, scale: float | None) -> None:
        """The sum (or what the operation is) of `pieces`, in their order, times `scale`, into `out`.

        `out` may be one of the pieces, of which the others are left as they are.
        """


def arithmetic_of(dtype: str, op: str) -> Arithmetic | None:
    """For a dtype's name and "sum", "max" or "min"; None when there is none."""
    if not dtype.startswith(_SHORT_FLOATS):
        return _numpy(dtype, op)
    return _torch(dtype, op) if "torch" in sys.modules else None


@functools.lru_cache
def _numpy(dtype: str, op: str) -> Arithmetic | None:
    try:
        return _NumPy(np.dtype(dtype), op)
    except TypeError:
        return None


@functools.lru_cache
def _torch(dtype: str, op: str) -> Arithmetic:
    return _Torch(dtype, op)


class _NumPy(Arithmetic):
    def __init__(self, dtype: np.dtype[Any], op: str) -> None:
        self._dtype, self.itemsize = dtype, dtype.itemsize
        self._combine: np.ufunc = {"sum": np.add, "max": np.maximum, "min": np.minimum}[op]

    def view(self, memory: np.ndarray) -> np.ndarray:
        return memory.view(self._dtype)

    def totals(self, elements: int) -> np.ndarray:
        return np.empty(elements, self._dtype)

    def combine(self, pieces: Sequence[Any], out: Any, scale: float | None) -> None:
        combine = self._combine
        if len(pieces) == 1:
            out[:] = pieces[0]
        elif len(pieces) == 2:
            combine(pieces[0], pieces[1], out=out)
        else:
            # `out` may be a later piece: it is written only with the last.
            total = combine(pieces[0], pieces[1])
            for piece in pieces[2:-1]:
                combine(total, piece, out=total)
            combine(total, pieces[-1], out=out)
        if scale is not None:
            np.multiply(out, out.dtype.type(scale), out=out)


class _Torch(Arithmetic):
    def __init__(self, dtype: str, op: str) -> None:
        import torch

        self._torch = torch
        self._dtype: torch.dtype = getattr(torch, dtype)
        self.itemsize = self._dtype.itemsize
        self._op = op

    def view(self, memory: np.ndarray) -> Any:
        return self._torch.from_numpy(memory).view(self._dtype)

    def totals(self, elements: int) -> Any:
        return self._torch.empty(elements, dtype=self._torch.float32)

    def combine(self, pieces: Sequence[Any], out: Any, scale: float | None) -> None:
        torch = self._torch
        total = pieces[0].to(torch.float32, copy=True)
        for piece in pieces[1:]:
            if self._op == "sum":
                total.add_(piece)
            else:
                (torch.maximum if self._op == "max" else torch.minimum)(
                    total, piece.float(), out=total
                )
        if scale is not None:
            total.mul_(scale)
        out.copy_(total)
