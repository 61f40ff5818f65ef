"""What transports for GPUs need of torch and CuPy: pointers, streams, events, pinned memory.

A library is imported when its first buffer comes. Streams and events are the library's own objects.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from mpistrat.arrays import Array, is_torch


class TorchLibrary:
    """torch on an accelerator, by what its module (`torch.cuda`, `torch.xpu`, …) has of all kinds.

    Args: kind: as of `devices.torch_accelerator`.

    Attributes:
        index: the GPU's number in this process.
    """

    def __init__(self, kind: str, index: int) -> None:
        self.index = index
        import torch

        self._torch, self._module = torch, torch.get_device_module(kind)
        self._device = torch.device(kind, index)

    @property
    def name(self) -> str:
        """Of GPUs of its kind: "NVIDIA H100"."""
        name_of = getattr(self._module, "get_device_name", lambda index: self._device.type)
        return str(name_of(self.index))

    def device(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which this GPU is the current device."""
        return self._module.device(self.index)

    def here(self, buffer: Array) -> Array:
        """`buffer`, or a copy on this GPU if it is on another."""
        return buffer if buffer.get_device() == self.index else buffer.to(self._device)

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        """An uninitialized array on the current device. `dtype`: the library's, or its name."""
        dtype = getattr(self._torch, dtype) if isinstance(dtype, str) else dtype
        return self._torch.empty(tuple(shape), dtype=dtype, device=self._device)

    def pointer(self, buffer: Array) -> int:
        """The address of its memory."""
        return buffer.data_ptr()

    def flat(self, buffer: Array) -> Array:
        """The same memory in one dimension."""
        return buffer.detach().view(-1)

    def new_stream(self) -> Any:
        """A stream that does not wait for the default stream."""
        return self._module.Stream(self.index)

    def current_stream(self) -> Any:
        """The stream that the program submits to."""
        return self._module.current_stream(self.index)

    def handle(self, stream: Any) -> int:
        """The `cudaStream_t` of a stream."""
        return stream.cuda_stream

    def record(self, stream: Any) -> Any:
        """An event that comes when all that `stream` holds now is done."""
        return stream.record_event()

    def is_done(self, event: Any) -> bool:
        """Whether the event has come. Returns at once."""
        return event.query()

    def pinned(self, nbytes: int) -> Array:
        """Page-locked host memory for `fetch`, as an array of bytes."""
        return self._torch.empty(nbytes, dtype=self._torch.uint8, device="cpu", pin_memory=True)

    def fetch(self, buffer: Array, memory: Array, stream: Any) -> Array:
        """Begin to copy the flat `buffer` into pinned `memory`. Returns: a host array over that memory."""
        host = memory[: buffer.nbytes].view(buffer.dtype)
        with self._module.stream(stream):
            host.copy_(buffer, non_blocking=True)
        return host

    def send(self, host: Array, buffer: Array, stream: Any) -> None:
        """Begin to copy what `fetch` returned back into `buffer`."""
        with self._module.stream(stream):
            buffer.copy_(host, non_blocking=True)


class CupyLibrary:
    """CuPy on a GPU. Its methods do what those of `TorchLibrary` do."""

    def __init__(self, index: int) -> None:
        self.index = index
        import cupy

        self._cupy = cupy

    @property
    def name(self) -> str:
        return "CuPy's"

    def device(self) -> contextlib.AbstractContextManager[Any]:
        return self._cupy.cuda.Device(self.index)

    def here(self, buffer: Array) -> Array:
        if buffer.device.id == self.index:
            return buffer
        with self.device():
            return self._cupy.array(buffer)

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        return self._cupy.empty(tuple(shape), dtype)

    def pointer(self, buffer: Array) -> int:
        return buffer.data.ptr

    def flat(self, buffer: Array) -> Array:
        return buffer.reshape(-1)

    def new_stream(self) -> Any:
        return self._cupy.cuda.Stream(non_blocking=True)

    def current_stream(self) -> Any:
        return self._cupy.cuda.get_current_stream()

    def handle(self, stream: Any) -> int:
        return stream.ptr

    def record(self, stream: Any) -> Any:
        return stream.record()

    def is_done(self, event: Any) -> bool:
        return event.done

    def pinned(self, nbytes: int) -> Array:
        import cupyx

        return cupyx.empty_pinned(nbytes, np.uint8)

    def fetch(self, buffer: Array, memory: Array, stream: Any) -> Array:
        host = memory[: buffer.nbytes].view(buffer.dtype)
        buffer.get(stream=stream, out=host, blocking=False)
        return host

    def send(self, host: Array, buffer: Array, stream: Any) -> None:
        buffer.set(host, stream=stream)


DeviceLibrary: TypeAlias = TorchLibrary | CupyLibrary


def library_of(buffer: Array, index: int) -> DeviceLibrary:
    """The library of `buffer`, on this process's accelerator number `index`."""
    return TorchLibrary(buffer.device.type, index) if is_torch(buffer) else CupyLibrary(index)
