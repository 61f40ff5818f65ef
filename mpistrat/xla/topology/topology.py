"""The mesh of the cores of a TPU slice, and the task that drives each core."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistrat.xla.topology.integer_arrays import MESH_RANK, as_coordinates, as_lengths


class TpuTopology:
    """The cores of a TPU slice: a mesh with the axes (x, y, z, core), and the coordinates of each task's devices.

    Args:
        serialized: the bytes that `serialized()` of another topology returned; the other arguments are then ignored.
        mesh_shape: number of cores along each of the four axes.
        device_coordinates: integers of shape [tasks, devices per task, 4]; the last axis is (x, y, z, core on the
            chip). Coordinates of the mesh may have no device.
    Raises: ValueError if `mesh_shape` is not four positive integers, if `serialized()` did not make `serialized`, or if
        a device is outside the mesh or at another device's coordinates; TypeError if a number is no integer.

    Example:
        >>> topology = ms.tpu.Topology(mesh_shape=[2, 1, 1, 1], device_coordinates=[[[0, 0, 0, 0]], [[1, 0, 0, 0]]])
        >>> topology.device_coordinates.shape, topology.num_missing_devices, topology.missing_devices.shape
        ((2, 1, 4), 0, (0, 4))
        >>> ms.tpu.Topology(serialized=topology.serialized()) == topology
        True

    Example:
        >>> topology = ms.tpu.Topology(mesh_shape=[2, 1, 1, 1], device_coordinates=[[[0, 0, 0, 0]], [[1, 0, 0, 0]]])
        >>> topology.mesh_shape, topology.num_tasks, topology.num_tpus_per_task
        (array([2, 1, 1, 1], dtype=int32), 2, 1)
    """

    mesh_rank = MESH_RANK

    def __init__(
        self,
        serialized: bytes | None = None,
        mesh_shape: Sequence[int] | NDArray[Any] | None = None,
        device_coordinates: Sequence[Any] | NDArray[Any] | None = None,
    ) -> None:
        if serialized:
            mesh_shape, device_coordinates = _parse(serialized)
        mesh = as_lengths("mesh_shape", mesh_shape, "cores per chip")
        devices = as_coordinates(
            "device_coordinates", device_coordinates, "tasks, devices per task"
        )
        self._places = _Places(mesh, devices)
        mesh.flags.writeable = False
        self._mesh_shape = mesh
        self._device_coordinates = devices

    @property
    def mesh_shape(self) -> NDArray[np.int32]:
        """The number of cores along each axis (x, y, z, core): read-only int32 of shape [4]."""
        return self._mesh_shape

    @property
    def device_coordinates(self) -> NDArray[np.int32]:
        """The coordinates of all devices: read-only int32 of shape [tasks, devices per task, 4].

        The last axis is (x, y, z, core on the chip).
        """
        return self._device_coordinates

    @property
    def num_tasks(self) -> int:
        """The number of tasks that drive the TPU slice."""
        return self._device_coordinates.shape[0]

    @property
    def num_tpus_per_task(self) -> int:
        """The number of devices of each task."""
        return self._device_coordinates.shape[1]

    @property
    def num_missing_devices(self) -> int:
        """The number of coordinates of the mesh that have no device."""
        return self._places.num_empty

    @cached_property
    def missing_devices(self) -> NDArray[np.int64]:
        """The coordinates of the mesh that have no device, ascending: integers of shape [`num_missing_devices`, 4]."""
        missing = np.ones(self._mesh_shape, bool)
        missing[tuple(self._device_coordinates.reshape(-1, MESH_RANK).T)] = False
        return np.argwhere(missing)

    def task_ordinal_at_coordinates(self, device_coordinates: Sequence[int]) -> int:
        """Return the number of the task that drives the device at (x, y, z, core).

        Raises: ValueError if no device has these coordinates.

        Example:
            >>> topology = ms.tpu.Topology(mesh_shape=[2, 1, 1, 1], device_coordinates=[[[0, 0, 0, 0]], [[1, 0, 0, 0]]])
            >>> topology.task_ordinal_at_coordinates([1, 0, 0, 0])
            1
        """
        return self._places.find(device_coordinates)[0]

    def tpu_device_ordinal_at_coordinates(self, device_coordinates: Sequence[int]) -> int:
        """Return the number, among the devices of its task, of the device at (x, y, z, core).

        Raises: ValueError if no device has these coordinates.

        Example:
            >>> topology = ms.tpu.Topology(mesh_shape=[1, 1, 1, 2], device_coordinates=[[[0, 0, 0, 0], [0, 0, 0, 1]]])
            >>> topology.tpu_device_ordinal_at_coordinates([0, 0, 0, 1])
            1
        """
        return self._places.find(device_coordinates)[1]

    def cpu_device_name_at_coordinates(
        self, device_coordinates: Sequence[int], job: str | None = None
    ) -> str:
        """Return the name of the host of a device at (x, y, z, core), such as "/job:worker/task:1/device:CPU:0".

        Without `job`, the name begins with "/task:". Raises: ValueError if no device has these coordinates.

        Example:
            >>> topology = ms.tpu.Topology(mesh_shape=[2, 1, 1, 1], device_coordinates=[[[0, 0, 0, 0]], [[1, 0, 0, 0]]])
            >>> topology.cpu_device_name_at_coordinates([1, 0, 0, 0], "worker")
            '/job:worker/task:1/device:CPU:0'
        """
        task, _ = self._places.find(device_coordinates)
        return f"{_of_job(job)}/task:{task}/device:CPU:0"

    def tpu_device_name_at_coordinates(
        self, device_coordinates: Sequence[int], job: str | None = None
    ) -> str:
        """Return the name of the TPU device at (x, y, z, core), such as "/job:worker/task:1/device:TPU:3".

        Without `job`, the name begins with "/task:". Raises: ValueError if no device has these coordinates.

        Example:
            >>> topology = ms.tpu.Topology(mesh_shape=[2, 1, 1, 1], device_coordinates=[[[0, 0, 0, 0]], [[1, 0, 0, 0]]])
            >>> topology.tpu_device_name_at_coordinates([1, 0, 0, 0])
            '/task:1/device:TPU:0'
        """
        task, device = self._places.find(device_coordinates)
        return f"{_of_job(job)}/task:{task}/device:TPU:{device}"

    def serialized(self) -> bytes:
        """Return this topology as bytes of JSON, for `Topology(serialized=…)`. (TensorFlow's are a protocol buffer.)"""
        fields = {
            "mesh_shape": self._mesh_shape.tolist(),
            "device_coordinates": self._device_coordinates.tolist(),
        }
        return json.dumps(fields).encode()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TpuTopology):
            return NotImplemented
        return self.serialized() == other.serialized()

    def __hash__(self) -> int:
        return hash(self.serialized())

    def __repr__(self) -> str:
        return (
            f"Topology(mesh_shape={self._mesh_shape.tolist()}, {self.num_tasks} tasks of "
            f"{self.num_tpus_per_task} devices)"
        )


Topology = TpuTopology  # its name in tf.tpu.experimental

_Place = tuple[int, ...]  # coordinates


class _Places:
    """Finds the device at given coordinates.

    Attributes: num_empty: number of coordinates of the mesh without a device.
    Raises: ValueError, when it is made, if a device is outside the mesh, or if two devices share coordinates.
    """

    def __init__(self, mesh: NDArray[np.int32], devices: NDArray[np.int32]) -> None:
        self._mesh = mesh.tolist()
        self._device_at: dict[_Place, tuple[int, int]] = {}
        for task, of_task in enumerate(devices.tolist()):
            for device, coordinates in enumerate(of_task):
                place = tuple(coordinates)
                here = f"device {device} of task {task} is at {coordinates}"
                if not self._has(place):
                    raise ValueError(f"{here}, outside of the mesh {self._mesh}")
                other_task, other = self._device_at.setdefault(place, (task, device))
                if (other_task, other) != (task, device):
                    raise ValueError(f"{here}, and so is device {other} of task {other_task}")
        self.num_empty = math.prod(self._mesh) - len(self._device_at)

    def _has(self, place: _Place) -> bool:
        if len(place) != MESH_RANK:
            return False
        return all(0 <= at < length for at, length in zip(place, self._mesh, strict=True))

    def find(self, coordinates: Sequence[int]) -> tuple[int, int]:
        """Return (task, number among the task's devices) of the device at `coordinates`.

        Raises: ValueError if no device is at `coordinates`.
        """
        place = tuple(map(operator.index, coordinates))
        if place in self._device_at:
            return self._device_at[place]
        if self._has(place):
            why = f"it is one of the {self.num_empty} places of the mesh {self._mesh} without one"
        else:
            last = [length - 1 for length in self._mesh]
            why = f"the mesh is {self._mesh}, so coordinates are four numbers from 0 to {last}"
        raise ValueError(f"no TPU device at {list(place)}: {why}")


def _of_job(job: str | None) -> str:
    if job is None:
        return ""
    return f"/job:{job}"


def _parse(serialized: bytes) -> tuple[Any, Any]:
    try:
        fields = json.loads(serialized)
        return fields["mesh_shape"], fields["device_coordinates"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"not the bytes that Topology.serialized() returns: {serialized!r:.60}; "
            f"for TensorFlow's own, give its mesh_shape and device_coordinates"
        ) from None
