"""Samples of values: a few elements of each tensor, copied to the host, so that a comparison costs little."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from mpistrat import arrays
from mpistrat.pytorch.watch.keys import Key

_ELEMENTS = 64  # of a tensor; a sample has fewer than twice as many
_PRIME = 7919  # moves the places of the elements from one sample to the next


class Samples:
    """Some elements of each tensor, and the texts of other values, as they are when the object is made.

    The host does not wait for a device here. The other methods wait, if `have_arrived` is not yet true.

    Args:
        values: the values by key. A tensor without elements that torch can read is left out, and so is a tensor of XLA:
            to read it, the host would wait, and XLA would compile one more graph.
        turn: a number, equal on all ranks; another number chooses other elements.
    """

    def __init__(self, values: Mapping[Key, Any], turn: int) -> None:
        self._texts: dict[Key, str] = {}
        self._parts: dict[Key, torch.Tensor] = {}
        devices = set()
        for key, value in values.items():
            if not isinstance(value, torch.Tensor):
                self._texts[key] = repr(value)
                continue
            if arrays.is_on_xla(value):
                continue
            # A tensor on the device "meta" has no elements, and a class of the program may have none to read.
            with contextlib.suppress(Exception):
                part = _part_of(value.detach(), turn)
                self._parts[key] = part.to("cpu", non_blocking=True, copy=True)
                devices.add(value.device)
        self._events: list[Any] = []
        for device in devices:
            if device.type != "cpu":
                stream = torch.get_device_module(device).current_stream(device)
                self._events.append(stream.record_event())

    def have_arrived(self) -> bool:
        """Return whether the host has the samples of all devices. Does not wait."""
        self._events = [event for event in self._events if not event.query()]
        return not self._events

    def checksum(self) -> int:
        """Return a number of 32 bits that changes with each bit of the samples."""
        self._wait()
        checksum = zlib.crc32(repr(self._texts).encode())
        for part in self._parts.values():
            checksum = zlib.crc32(part.view(torch.uint8).numpy().data, checksum)
        return checksum

    def by_key(self) -> dict[Key, Any]:
        """Return the texts, and a checksum for each tensor: equal for equal numbers, such as 0 and -0, and all NaNs."""
        found: dict[Key, Any] = dict(self._texts)
        for key in self._parts:
            found[key] = zlib.crc32(repr(self.elements(key)).encode())
        return found

    def elements(self, key: Key) -> list[str]:
        """Return the texts of the sampled elements of a tensor, or the text of another value."""
        if key in self._texts:
            return [self._texts[key]]
        self._wait()
        # Adding 0 makes -0 equal to 0.
        return [repr(number + 0) for number in self._parts[key].tolist()]

    def _wait(self) -> None:
        for event in self._events:
            event.synchronize()
        self._events.clear()


def _part_of(tensor: torch.Tensor, turn: int) -> torch.Tensor:
    """Return elements of `tensor`, 1-D; a view of it, if it is contiguous."""
    if tensor.layout is not torch.strided:
        tensor = tensor.coalesce().values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    step = max(1, tensor.numel() // _ELEMENTS)
    return tensor.reshape(-1)[turn * _PRIME % step :: step]
