"""Samples of values: a few elements of each tensor, copied to the host together, so that a comparison costs little."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from mpistrat import arrays
from mpistrat.pytorch.watch.digests import flat_bits
from mpistrat.pytorch.watch.keys import Key

_ELEMENTS = 64  # of a tensor; a sample has fewer than twice as many
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PRIME = 7919  # moves the places of the elements from one sample to the next


class _Piece(NamedTuple):
    """The elements of one tensor in a buffer.

    Attributes:
        kind: the device and the integer dtype that name the buffer.
        first, end: the place of the elements in the buffer.
        dtype: the tensor's dtype; of a complex tensor, the dtype of its real part.
    """

    kind: tuple[torch.device, torch.dtype]
    first: int
    end: int
    dtype: torch.dtype


class Samples:
    """Some elements of each tensor, and the texts of other values, as they are when the object is made.

    The host does not wait for a device here. The other methods wait, if `have_arrived` is not yet true.

    Args:
        values: the values by key. A tensor that cannot be read as bits is left out, and so is a tensor of XLA: to read
            it, the host would wait, and XLA would compile one more graph.
        turn: a number, equal on all ranks; another number chooses other elements.
    """

    def __init__(self, values: Mapping[Key, Any], turn: int) -> None:
        self._texts: dict[Key, str] = {}
        self._pieces: dict[Key, _Piece] = {}
        parts: dict[Any, list[torch.Tensor]] = {}
        ends: dict[Any, int] = {}
        for key, value in values.items():
            if not isinstance(value, torch.Tensor):
                self._texts[key] = repr(value)
                continue
            if arrays.is_on_xla(value):
                continue
            # A class of tensors that the program brings along may have no bits to read.
            with contextlib.suppress(Exception):
                part = _part_of(value, turn)
                kind = part.device, part.dtype
                first = ends.get(kind, 0)
                ends[kind] = first + part.numel()
                parts.setdefault(kind, []).append(part)
                self._pieces[key] = _Piece(kind, first, ends[kind], value.real.dtype)
        self._buffers: dict[Any, torch.Tensor] = {}
        self._events: list[Any] = []
        for kind, together in parts.items():
            self._buffers[kind] = torch.cat(together).to("cpu", non_blocking=True)
            if kind[0].type != "cpu":
                stream = torch.get_device_module(kind[0]).current_stream(kind[0])
                self._events.append(stream.record_event())

    def have_arrived(self) -> bool:
        """Return whether the host has the samples of all devices. Does not wait."""
        self._events = [event for event in self._events if not event.query()]
        return not self._events

    def checksum(self) -> int:
        """Return a number of 32 bits that changes with each bit of the samples."""
        self._wait()
        checksum = zlib.crc32(repr(self._texts).encode())
        for buffer in self._buffers.values():
            checksum = zlib.crc32(buffer.numpy().data, checksum)
        return checksum

    def by_key(self) -> dict[Key, Any]:
        """Return the texts, and a checksum for each tensor: equal for equal numbers, such as 0 and -0, and all NaNs."""
        found: dict[Key, Any] = dict(self._texts)
        for key in self._pieces:
            found[key] = zlib.crc32(self._numbers(key).numpy().data)
        return found

    def elements(self, key: Key) -> list[str]:
        """Return the texts of the sampled elements of a tensor, or the text of another value."""
        if key in self._texts:
            return [self._texts[key]]
        return [repr(number) for number in self._numbers(key).tolist()]

    def _numbers(self, key: Key) -> torch.Tensor:
        self._wait()
        piece = self._pieces[key]
        bits = self._buffers[piece.kind][piece.first : piece.end]
        if not piece.dtype.is_floating_point:
            return bits
        numbers = bits.view(piece.dtype).double() + 0.0
        return torch.where(numbers.isnan(), torch.nan, numbers)

    def _wait(self) -> None:
        for event in self._events:
            event.synchronize()
        self._events.clear()


def _part_of(tensor: torch.Tensor, turn: int) -> torch.Tensor:
    """Return the bits of elements of `tensor`, 1-D integers. Raises: an error for a tensor without values."""
    if tensor.is_meta:
        raise ValueError("a tensor on the device meta has no values")
    dense = tensor.detach()
    if dense.layout is not torch.strided or dense.is_complex():
        dense = flat_bits(dense)
    elif not dense.is_contiguous():
        # In the order of memory a dense tensor needs no copy, whatever its memory format.
        strides = dense.stride()
        dense = dense.permute(sorted(range(dense.ndim), key=strides.__getitem__, reverse=True))
    stride = max(1, dense.numel() // _ELEMENTS)
    part = dense.reshape(-1)[turn * _PRIME % stride :: stride]
    return part.view(_INTEGERS[part.element_size()])
