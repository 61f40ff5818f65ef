"""DeviceAssignment: every core once, lookups that undo each other, and requests that cannot be met."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.tpu import DeviceAssignment, DeviceOrderMode, Topology


def mesh_of(shape, tasks=1, missing=0):
    """A mesh whose last `missing` places have no device, the others by coordinates."""
    places = list(np.ndindex(*shape))[: math.prod(shape) - missing]
    return Topology(
        mesh_shape=shape, device_coordinates=np.reshape(places, (tasks, len(places) // tasks, 4))
    )


@st.composite
def requests(draw):
    """A topology, and a shape, stride and number of replicas that fit into it."""
    mesh = [draw(st.integers(1, 6)) for _ in range(3)] + [draw(st.integers(1, 2))]
    shape = [draw(st.integers(1, length)) for length in mesh]
    stride = [draw(st.integers(1, a // b)) for a, b in zip(mesh, shape, strict=True)]
    room = math.prod(a // (b * c) * c for a, b, c in zip(mesh, shape, stride, strict=True))
    replicas = draw(st.integers(0, room) | st.just(room))
    tasks = draw(st.sampled_from([n for n in (1, 2, 3, 4) if math.prod(mesh) % n == 0]))
    mode = draw(st.sampled_from([DeviceOrderMode.AUTO, DeviceOrderMode.MESH]))
    return mesh_of(mesh, tasks), shape, stride, replicas, mode


@given(requests())
def test_every_core_at_most_once_and_lookups_agree(request):
    topology, shape, stride, replicas, mode = request
    built = DeviceAssignment.build(topology, shape, stride, replicas, mode)
    assert built.core_assignment.shape == (replicas, math.prod(shape), 4)
    cores = [tuple(core) for core in built.core_assignment.reshape(-1, 4).tolist()]
    assert len(set(cores)) == len(cores)
    for replica in range(replicas):
        ends = built.core_assignment[replica].max(axis=0) - built.core_assignment[replica].min(
            axis=0
        )
        assert ends.tolist() == [(a - 1) * b for a, b in zip(shape, stride, strict=True)]
        for core in range(built.num_cores_per_replica):
            place = built.coordinates(replica, core)
            task = topology.task_ordinal_at_coordinates(place)
            ordinal = built.tpu_ordinal(replica, core)
            assert tuple(topology.device_coordinates[task, ordinal]) == place
            assert replica in built.lookup_replicas(task, core)
            assert built.host_device(replica, core) == f"/task:{task}/device:CPU:0"
    for core in range(built.num_cores_per_replica if replicas else 0):
        found = []
        for task in range(topology.num_tasks):
            try:
                found += built.lookup_replicas(task, core)
            except ValueError:
                continue
        assert sorted(found) == list(range(replicas))


def test_rings_of_replicas_and_of_their_chips():
    built = DeviceAssignment.build(mesh_of([4, 4, 2, 2]), [2, 2, 1, 2], None, 8, "ring")
    for replica in built.core_assignment:
        chips = replica[::2, :3]
        assert (np.abs(np.diff(chips, axis=0, append=chips[:1])).sum(axis=1) == 1).all()
    blocks = built.core_assignment[:, 0, :3] // [2, 2, 1]
    assert all(np.abs(a - b).sum() == 1 for a, b in pairwise([*blocks, blocks[0]]))
    assert built.num_replicas == 8


def test_missing_devices_are_passed_over():
    built = DeviceAssignment.build(mesh_of([2, 2, 1, 1], missing=1), num_replicas=3)
    assert built.core_assignment.tolist() == [[[0, 0, 0, 0]], [[0, 1, 0, 0]], [[1, 0, 0, 0]]]


def test_a_serialized_topology():
    mesh = mesh_of([2, 1, 1, 1])
    assert DeviceAssignment.build(mesh.serialized()).topology == mesh


BOARD = mesh_of([2, 2, 1, 2])
GAPS = mesh_of([2, 2, 1, 2], missing=2)


@pytest.mark.parametrize(
    ("topology", "fields", "message"),
    [
        (
            BOARD,
            {"computation_shape": [1, 1, 1, 2], "num_replicas": 9},
            r"9 replicas of 2 cores .* the mesh \[2, 2, 1, 2\] has room for 4: ask for 0 to 4",
        ),
        (BOARD, {"num_replicas": -1}, "-1 replicas"),
        (
            BOARD,
            {"computation_shape": [1, 2, 1, 1], "computation_stride": [1, 2, 1, 1]},
            r"spans \[1, 4, 1, 1\] cores, and the mesh is \[2, 2, 1, 2\]",
        ),
        (
            BOARD,
            {"computation_shape": [1, 1, 2]},
            r"computation_shape must be 4 .* got \[1, 1, 2\]",
        ),
        (BOARD, {"computation_stride": [1, 0, 1, 1]}, "computation_stride must be 4 positive"),
        (
            BOARD,
            {"num_replicas": 2, "device_order_mode": "RING"},
            r"\(2 cores; computation_shape has 1\).*room for \(8; 2 were asked for\): use AUTO",
        ),
        (BOARD, {"device_order_mode": "SNAKE"}, "one of AUTO, RING, MESH; got 'SNAKE'"),
        (BOARD, {"device_order_mode": 3}, "one of AUTO, RING, MESH; got 3"),
        (
            GAPS,
            {"computation_shape": [1, 1, 1, 2], "num_replicas": 4},
            r"4 replicas of 2 cores need 8; of the mesh \[2, 2, 1, 2\] 6 are there: ask for 0 to 3",
        ),
        (GAPS, {"computation_stride": [1, 1, 1, 2]}, "there it must be 1"),
        ("mesh", {}, "must be a mpistrat.tpu.Topology, got 'mesh'"),
    ],
)
def test_what_cannot_be_built(topology, fields, message):
    with pytest.raises(ValueError, match=message):
        DeviceAssignment.build(topology, **fields)


@pytest.mark.parametrize(
    ("cores", "message"),
    [
        ([[0, 0, 0, 0]], r"\[replicas, cores per replica, 4\], got \[1, 4\]"),
        ([[[2, 0, 0, 0]]], r"no TPU device at \[2, 0, 0, 0\]: the mesh is"),
        ([[[1, 1, 0, 0]]], r"no TPU device at \[1, 1, 0, 0\]: it is one of the 2 places"),
    ],
)
def test_wrong_cores(cores, message):
    with pytest.raises(ValueError, match=message):
        DeviceAssignment(GAPS, cores)


def test_lookups_of_what_is_not_there():
    built = DeviceAssignment.build(BOARD, [1, 1, 1, 2], num_replicas=2)
    with pytest.raises(ValueError, match=r"core 0 on task 1: 2 replicas .* use the tasks \[0\]"):
        built.lookup_replicas(1, 0)
    with pytest.raises(ValueError, match="core 2 of replica 0: there are 2 replicas of 2 cores"):
        built.tpu_device(0, 2)
    with pytest.raises(ValueError, match="of replica -1"):
        built.coordinates(-1, 0)
