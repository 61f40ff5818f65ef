"""Buffers on GPUs through pinned host memory, in chunks of 4 MiB; three chunks are on their way at a time."""

from __future__ import annotations

import functools
from typing import Any

from mpistrat.arrays import Array, itemsize, num_elements
from mpistrat.communicators.reduction import Reduction
from mpistrat.communicators.transports.accelerator.buffers import DeviceTransport
from mpistrat.communicators.transports.accelerator.library import DeviceLibrary

# Bytes of a chunk: large enough for full speed on the bus, small enough that the first chunk is soon there.
CHUNK = 1 << 22
BUFFERS = 3


class StagedTransport(DeviceTransport):
    """All-reduces a buffer chunk by chunk, with copies and arithmetic at the same time.

    While the host combines chunk i, chunk i + 1 comes from the GPU and chunk i - 1 goes back. Other collectives copy
    the whole buffer to the host at once.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stages_of = functools.cache(_Stages)

    def _combine(self, buffer: Array, reduction: Reduction) -> None:
        library = self.library(buffer)
        stages = self._stages_of(library)
        flat = library.flat(buffer)
        step = CHUNK // itemsize(flat)
        chunks = [flat[start : start + step] for start in range(0, num_elements(flat), step)]
        stages.begin()
        hosts = [stages.fetch(0, chunks[0])] if chunks else []
        for i, chunk in enumerate(chunks):
            if i + 1 < len(chunks):
                hosts.append(stages.fetch(i + 1, chunks[i + 1]))
            host, fetched = hosts[i]
            self.wait(library, fetched)
            self.host.all_reduce(host, reduction)
            stages.send(i, host, chunk)
        stages.end()


class _Stages:
    """Three pinned host buffers that the chunks take in turn, and one stream for each direction of the copies."""

    def __init__(self, library: DeviceLibrary) -> None:
        self._library = library
        with library.device():
            self._memory = [library.pinned(CHUNK) for _ in range(BUFFERS)]
            self._down = library.new_stream()
            self._up = library.new_stream()
        self._sent: list[Any] = [None] * BUFFERS  # events of the last copies out of the buffers

    def begin(self) -> None:
        """Let the copies to the host start after the work that the program has submitted so far. Does not wait."""
        self._down.wait_event(self._library.record(self._library.current_stream()))

    def fetch(self, number: int, chunk: Array) -> tuple[Array, Any]:
        """Start to copy chunk `number` to the host, when chunk `number` - 3 has left the same pinned buffer.

        Returns: the pinned host array, and the event after which the array has the values.
        """
        place = number % BUFFERS
        if self._sent[place] is not None:
            self._down.wait_event(self._sent[place])
        host = self._library.fetch(chunk, self._memory[place], self._down)
        return host, self._library.record(self._down)

    def send(self, number: int, host: Array, chunk: Array) -> None:
        self._library.send(host, chunk, self._up)
        self._sent[number % BUFFERS] = self._library.record(self._up)

    def end(self) -> None:
        """Let the work that the program submits from now on run after the copies to the GPU. Does not wait."""
        self._library.current_stream().wait_event(self._library.record(self._up))
