"""Area tpu_topology: meshes of TPU cores, the cores that replicas get, and what can be split over them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from conformance.outcomes import CannotInterpret, probe
from conformance.stage import Handler, Stage
from mpistrat.tpu import DeviceAssignment, DeviceOrderMode, Topology
from mpistrat.xla.topology.logical_devices import check_logical_device, check_split

# Shape and number of tasks of the meshes that are recorded by name only.
_MESHES = {
    "donut2x2": ([2, 2, 1, 2], 1),
    "2hosts": ([2, 2, 1, 2], 2),
    "4x4x1": ([4, 4, 1, 2], 4),
    "2x2x2": ([2, 2, 2, 1], 2),
    "4x2x2": ([4, 2, 2, 2], 4),
    "4x4x4": ([4, 4, 4, 1], 16),
    "3x1x1": ([3, 1, 1, 2], 1),
}


def _topology_of(inputs: dict[str, Any]) -> Any:
    if inputs.get("topology") == "str":
        return "a text, not a topology"
    if "mesh" in inputs:
        return _named_mesh(inputs["mesh"])
    return Topology(
        mesh_shape=inputs["mesh_shape"], device_coordinates=inputs["device_coordinates"]
    )


def _named_mesh(name: str) -> Topology:
    """The cores of a chip first, then x, y and z, each task having as many as the next."""
    if name not in _MESHES:
        raise CannotInterpret(f"no mesh {name!r}")
    mesh, tasks = _MESHES[name]
    lengths_by_turn = [mesh[2], mesh[1], mesh[0], mesh[3]]
    cores = [[x, y, z, core] for z, y, x, core in itertools.product(*map(range, lengths_by_turn))]
    per_task = len(cores) // tasks
    rows = [cores[first : first + per_task] for first in range(0, len(cores), per_task)]
    return Topology(mesh_shape=mesh, device_coordinates=rows)


def _recorded_fields(stage: Stage, fields: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """The fields that are recorded of this case: not of every case are all."""
    expect = stage.case["expect"]
    wanted = fields if "error" in expect else expect
    if not set(wanted) <= set(fields):
        raise CannotInterpret(f"fields {sorted(set(wanted) - set(fields))}")
    return {name: fields[name]() for name in wanted}


def topology(stage: Stage) -> Any:
    mesh = _topology_of(stage.inputs)

    def query(coordinates: list[int]) -> dict[str, Any]:
        return {
            "coord": coordinates,
            "task": mesh.task_ordinal_at_coordinates(coordinates),
            "ordinal": mesh.tpu_device_ordinal_at_coordinates(coordinates),
            "cpu": mesh.cpu_device_name_at_coordinates(coordinates),
            "tpu": mesh.tpu_device_name_at_coordinates(coordinates),
            "cpu_job": mesh.cpu_device_name_at_coordinates(coordinates, job="w"),
            "tpu_job": mesh.tpu_device_name_at_coordinates(coordinates, job="w"),
        }

    fields: dict[str, Callable[[], Any]] = {
        "mesh_rank": lambda: mesh.mesh_rank,
        "num_tasks": lambda: mesh.num_tasks,
        "num_tpus_per_task": lambda: mesh.num_tpus_per_task,
        "missing_devices": lambda: mesh.missing_devices.tolist(),
        "queries": lambda: [query(asked["coord"]) for asked in stage.case["expect"]["queries"]],
        "roundtrip_equal": lambda: Topology(serialized=mesh.serialized()) == mesh,
    }
    return _recorded_fields(stage, fields)


def _described(stage: Stage, assignment: DeviceAssignment) -> dict[str, Any]:
    def of_cores(ask: Callable[[int, int], Any]) -> list[list[Any]]:
        cores = range(assignment.num_cores_per_replica)
        return [
            [ask(replica, core) for core in cores] for replica in range(assignment.num_replicas)
        ]

    def lookups() -> dict[str, Any]:
        asked = stage.case["expect"]["lookup_replicas"]
        return {
            text: probe(lambda text=text: assignment.lookup_replicas(*map(int, text.split(","))))
            for text in asked
        }

    fields: dict[str, Callable[[], Any]] = {
        "num_replicas": lambda: assignment.num_replicas,
        "num_cores_per_replica": lambda: assignment.num_cores_per_replica,
        "core_assignment": lambda: assignment.core_assignment.tolist(),
        "tpu_ordinals": lambda: of_cores(assignment.tpu_ordinal),
        "host_devices": lambda: of_cores(assignment.host_device),
        "tpu_devices": lambda: of_cores(lambda r, c: assignment.tpu_device(r, c, job="worker")),
        "lookup_replicas": lookups,
    }
    return _recorded_fields(stage, fields)


def build(stage: Stage) -> Any:
    arguments = dict(stage.program.get("kwargs", {}))
    if mode := arguments.get("device_order_mode"):
        arguments["device_order_mode"] = DeviceOrderMode[mode]
    return _described(stage, DeviceAssignment.build(_topology_of(stage.inputs), **arguments))


def constructor(stage: Stage) -> Any:
    mesh = _topology_of(stage.inputs)
    return _described(stage, DeviceAssignment(mesh, stage.inputs["core_assignment"]))


def assign_to_logical_device(stage: Stage) -> Any:
    check_logical_device(stage.inputs["logical_device_id"], stage.program["logical_devices"])
    return {"value": "ok"}


def split_to_logical_devices(stage: Stage) -> Any:
    check_split(
        stage.program["tensor_shape"],
        stage.inputs["partition_dimensions"],
        stage.program["logical_devices"],
    )
    return {"value": "ok"}


HANDLERS: dict[str, Handler] = {
    "topology": topology,
    "device_assignment_build": build,
    "DeviceAssignment": constructor,
    "assign_to_logical_device": assign_to_logical_device,
    "split_to_logical_devices": split_to_logical_devices,
}
