"""Topology of TPUs: what it says of each core, and the meshes that it refuses."""

import pickle

import numpy as np
import pytest

from mpistrat.tpu import Topology

# Two tasks of two devices each; (1, 0, 0, 0) and (2, 0, 0, 1) have none.
MESH = [3, 1, 1, 2]
DEVICES = [[[0, 0, 0, 0], [0, 0, 0, 1]], [[1, 0, 0, 1], [2, 0, 0, 0]]]


def test_lookups():
    t = Topology(mesh_shape=MESH, device_coordinates=DEVICES)
    assert (t.mesh_rank, t.num_tasks, t.num_tpus_per_task, t.num_missing_devices) == (4, 2, 2, 2)
    assert t.mesh_shape.tolist() == MESH
    assert t.device_coordinates.tolist() == DEVICES
    assert t.missing_devices.tolist() == [[1, 0, 0, 0], [2, 0, 0, 1]]
    assert t.task_ordinal_at_coordinates([2, 0, 0, 0]) == 1
    assert t.tpu_device_ordinal_at_coordinates(np.array([2, 0, 0, 0])) == 1
    assert t.tpu_device_name_at_coordinates([2, 0, 0, 0], "w") == "/job:w/task:1/device:TPU:1"
    assert t.cpu_device_name_at_coordinates([2, 0, 0, 0]) == "/task:1/device:CPU:0"


def test_it_is_a_value():
    t = Topology(mesh_shape=MESH, device_coordinates=DEVICES)
    other = Topology(mesh_shape=MESH, device_coordinates=DEVICES[::-1])
    assert t == Topology(serialized=t.serialized()) == pickle.loads(pickle.dumps(t))
    assert t != other
    assert len({t, other, Topology(serialized=t.serialized())}) == 2
    with pytest.raises(ValueError, match="read-only"):
        t.device_coordinates[0, 0, 0] = 1


def test_a_large_mesh_with_few_devices_takes_no_memory():
    t = Topology(mesh_shape=[100000, 100000, 2, 2], device_coordinates=[[[7, 99999, 1, 0]]])
    assert t.num_missing_devices == 4 * 10**10 - 1


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"mesh_shape": [3, 1, 2]}, ValueError, r"4 positive integers .* got \[3, 1, 2\]"),
        ({"mesh_shape": [3, 0, 1, 2]}, ValueError, r"4 positive integers .* got \[3, 0, 1, 2\]"),
        ({"mesh_shape": None}, TypeError, "mesh_shape must be integers, got None"),
        ({"mesh_shape": [3.0, 1, 1, 2]}, TypeError, "mesh_shape must be integers"),
        ({"mesh_shape": [2**32 + 3, 1, 1, 2]}, ValueError, "32 bits"),
        ({"device_coordinates": None}, TypeError, "device_coordinates must be integers, got None"),
        ({"device_coordinates": DEVICES[0]}, ValueError, r"tasks, .* 4\], got \[2, 4\]"),
        ({"device_coordinates": [[[0, 0, 0]]]}, ValueError, r"tasks, .* 4\], got \[1, 1, 3\]"),
        (
            {"device_coordinates": [*DEVICES, [[0, 0, 0, 0]]]},
            ValueError,
            "rows of different lengths",
        ),
        (
            {"device_coordinates": [[[0, 0, 0, 0], [3, 0, 0, 0]]]},
            ValueError,
            r"device 1 of task 0 is at \[3, 0, 0, 0\], outside of the mesh \[3, 1, 1, 2\]",
        ),
        ({"device_coordinates": [[[0, 0, -1, 0]]]}, ValueError, "outside of the mesh"),
        (
            {"device_coordinates": [[[0, 0, 0, 0]], [[0, 0, 0, 0]]]},
            ValueError,
            "device 0 of task 1 is at .* and so is device 0 of task 0",
        ),
        ({"serialized": b"\n\x04\x02\x02\x01\x02"}, ValueError, "TensorFlow's own"),
        ({"serialized": b"[]"}, ValueError, "not the bytes"),
    ],
)
def test_wrong_meshes(fields, error, message):
    with pytest.raises(error, match=message):
        Topology(**{"mesh_shape": MESH, "device_coordinates": DEVICES, **fields})


@pytest.mark.parametrize(
    ("coordinates", "message"),
    [
        ([1, 0, 0, 0], "one of the 2 places of the mesh .* without one"),
        ([3, 0, 0, 0], r"from 0 to \[2, 0, 0, 1\]"),
        ([-1, 0, 0, 0], r"from 0 to \[2, 0, 0, 1\]"),
        ([0, 0, 0], r"from 0 to \[2, 0, 0, 1\]"),
    ],
)
def test_no_device_there(coordinates, message):
    t = Topology(mesh_shape=MESH, device_coordinates=DEVICES)
    with pytest.raises(ValueError, match=message):
        t.tpu_device_name_at_coordinates(coordinates)
