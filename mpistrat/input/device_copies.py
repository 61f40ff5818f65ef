"""Copies of batches to devices, made while the replicas compute earlier steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mpistrat import arrays, nest


class _CopyUnderWay(NamedTuple):
    batch: Any
    event: Any  # an event of the copying stream: the batch is on its device


class DeviceCopies:
    """Copies each replica's batch from pinned memory to the replica's device, on a stream for copies only.

    It copies torch tensors. NumPy arrays are copied on the host, and stay there. For XLA devices numeric NumPy arrays
    become tensors on the device, because XLA programs take no NumPy arrays. Other values with a method `to`, such as a
    `PackedSequence`, move by it when they are asked for, except to XLA devices. "cpu:0" and "cpu:1" name replicas that
    share the host's memory.

    Args:
        devices: the devices of this rank's replicas, in replica order; () if batches stay where they are.

    Attributes:
        needed: whether some replica's device is not the host. If False, `start` and `arrived` are not called.
    """

    def __init__(self, devices: tuple[str, ...]) -> None:
        self._devices = devices
        self._streams: dict[str, Any] = {}
        self.needed = False in [device.startswith("cpu") for device in devices]

    def start(self, batches: list[Any]) -> list[Any]:
        """Begin to copy each replica's batch to its device, without waiting. Returns: a list to give to `arrived`."""
        return [
            self._start(device, batch) for device, batch in zip(self._devices, batches, strict=True)
        ]

    def arrived(self, batches: list[Any]) -> list[Any]:
        """Return the batches that `start` has copied. The device's current stream waits for the copies, not the host.

        Args: batches: a result of `start`.
        """
        return [
            self._arrived(device, batch)
            for device, batch in zip(self._devices, batches, strict=True)
        ]

    def _start(self, device: str, batch: Any) -> Any:
        if device.startswith(("cpu", "xla")) or not any(map(arrays.is_torch, nest.flatten(batch))):
            return nest.map_structure(lambda leaf: _to(device, leaf), batch)
        import torch

        of_device = torch.get_device_module(device)
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = of_device.Stream(device)

        def copy_of(leaf: Any) -> Any:
            if arrays.is_torch(leaf) and leaf.is_cpu:
                leaf = leaf.pin_memory()
            return _to(device, leaf)

        with of_device.stream(stream):
            moved = nest.map_structure(copy_of, batch)
            return _CopyUnderWay(moved, stream.record_event())

    def _arrived(self, device: str, batch: Any) -> Any:
        if isinstance(batch, _CopyUnderWay):
            import torch

            current = torch.get_device_module(device).current_stream(device)
            current.wait_event(batch.event)
            batch = batch.batch
            for leaf in nest.flatten(batch):
                if arrays.is_torch(leaf) and arrays.is_on_gpu(leaf):
                    # The copying stream's pool owns the memory, and must not reuse it while the current stream reads.
                    leaf.record_stream(current)
        if device.startswith(("cpu", "xla")):
            return batch

        # Other leaves move themselves, on the current stream: their tensors are not known. Tensors stay as they are.
        def to_device(leaf: Any) -> Any:
            return leaf.to(device) if hasattr(leaf, "to") else leaf

        return nest.map_structure(to_device, batch)


def _to(device: str, leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        leaf = leaf.copy()  # the source may reuse its memory before the program has the batch
        if not device.startswith("xla") or leaf.dtype.kind not in "biufc":
            return leaf
        leaf = arrays.as_tensor(leaf)
    if arrays.is_array(leaf):
        return arrays.to_device(leaf, device)
    return leaf
