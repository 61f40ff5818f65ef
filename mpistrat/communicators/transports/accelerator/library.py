"""The parts of torch and CuPy that transports for GPUs use: pointers, streams, events, pinned memory.

torch or CuPy is imported when its class here is built. Streams and events are objects of torch or CuPy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from mpistrat.arrays import Array, is_torch


class TorchLibrary:
    """torch on one accelerator. It uses only functions that `torch.cuda`, `torch.xpu` and other such modules share.

    Args:
        kind: torch's name for the kind of accelerator, as `devices.torch_accelerator` returns it: "cuda".
        index: the accelerator's number in this process.
    """

    def __init__(self, kind: str, index: int) -> None:
        self.index = index
        import torch

        self._torch = torch
        self._module = torch.get_device_module(kind)
        self._device = torch.device(kind, index)

    @property
    def name(self) -> str:
        """The accelerator's model, "NVIDIA H100", or its kind where torch does not tell the model."""
        name_of = getattr(self._module, "get_device_name", lambda index: self._device.type)
        return str(name_of(self.index))

    def device(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which this accelerator is the current device."""
        return self._module.device(self.index)

    def here(self, buffer: Array) -> Array:
        """Return `buffer`, or a copy on this accelerator if `buffer` is on another accelerator."""
        if buffer.get_device() == self.index:
            return buffer
        return buffer.to(self._device)

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        """Return an uninitialized array on this accelerator. `dtype` is a dtype of torch, or its name: "float32"."""
        if isinstance(dtype, str):
            dtype = getattr(self._torch, dtype)
        return self._torch.empty(tuple(shape), dtype=dtype, device=self._device)

    def pointer(self, buffer: Array) -> int:
        """Return the address of the buffer's memory on the device."""
        return buffer.data_ptr()

    def flat(self, buffer: Array) -> Array:
        """Return a view of the same memory with one dimension."""
        return buffer.detach().view(-1)

    def new_stream(self) -> Any:
        """Return a new stream on this accelerator that does not wait for the default stream."""
        return self._module.Stream(self.index)

    def current_stream(self) -> Any:
        """Return the stream that the program's thread submits to now."""
        return self._module.current_stream(self.index)

    def handle(self, stream: Any) -> int:
        """Return the `cudaStream_t` of a stream, as an integer."""
        return stream.cuda_stream

    def record(self, stream: Any) -> Any:
        """Record an event in `stream`, and return it. The event comes when all work that `stream` holds now is done."""
        return stream.record_event()

    def is_done(self, event: Any) -> bool:
        """Return whether the device has reached the event of `record`. Does not wait."""
        return event.query()

    def pinned(self, nbytes: int) -> Array:
        """Return page-locked host memory for `fetch`: an array of `nbytes` uint8."""
        return self._torch.empty(nbytes, dtype=self._torch.uint8, device="cpu", pin_memory=True)

    def fetch(self, buffer: Array, memory: Array, stream: Any) -> Array:
        """Start a copy of the flat `buffer` into pinned `memory` on `stream`. Does not wait.

        Returns: a host array over the start of `memory`, with the buffer's dtype and length.
        """
        host = memory[: buffer.nbytes].view(buffer.dtype)
        with self._module.stream(stream):
            host.copy_(buffer, non_blocking=True)
        return host

    def send(self, host: Array, buffer: Array, stream: Any) -> None:
        """Start a copy of `host`, the array that `fetch` returned, back into `buffer` on `stream`. Does not wait."""
        with self._module.stream(stream):
            buffer.copy_(host, non_blocking=True)


class CupyLibrary:
    """CuPy on one GPU. Its methods do the same as the methods of `TorchLibrary` with the same names."""

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
    """Return the library that made `buffer`, for this process's accelerator number `index`."""
    if is_torch(buffer):
        return TorchLibrary(buffer.device.type, index)
    return CupyLibrary(index)
