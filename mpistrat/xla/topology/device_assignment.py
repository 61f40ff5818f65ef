"""Maps each logical core of each replica to a core of a TPU slice."""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistrat.xla.topology.integer_arrays import MESH_RANK, as_coordinates, as_lengths
from mpistrat.xla.topology.topology import TpuTopology

Lengths = tuple[int, ...]  # along x, y, z and the cores of a chip
Chip = tuple[int, ...]


class DeviceOrderMode(enum.IntEnum):
    """The order in which `DeviceAssignment.build` gives cores of the mesh to replicas and to their logical cores.

    AUTO: rings where `RING` is possible, else the order of `MESH`.
    RING: each replica is a neighbour of the next, and the last is a neighbour of the first. The chips of each replica
        form such a ring, too.
    MESH: the order of coordinates.

    Example:
        >>> topology = ms.tpu.Topology(mesh_shape=[1, 1, 1, 1], device_coordinates=[[[0, 0, 0, 0]]])
        >>> mode = ms.tpu.DeviceOrderMode.MESH
        >>> ms.tpu.DeviceAssignment.build(topology, device_order_mode=mode)
        DeviceAssignment(1 replicas of 1 cores on Topology(mesh_shape=[1, 1, 1, 1], 1 tasks of 1 devices))
    """

    AUTO = 0
    RING = 1
    MESH = 2


class DeviceAssignment:
    """Says where in a TPU mesh the cores of each replica are. `build` chooses them; the constructor takes coordinates.

    A replica numbers its cores from 0; the number is called the logical core.

    Args:
        topology: the mesh, a `Topology`.
        core_assignment: integers of shape [replicas, cores per replica, 4]; the last axis is a core's coordinates (x,
            y, z, core on the chip).
    Raises: ValueError for another shape, for coordinates without a device, or if `topology` is no `Topology`; TypeError
        if the coordinates are no integers.

    Example:
        >>> mesh = ms.tpu.Topology(mesh_shape=[1, 1, 1, 4], device_coordinates=[[[0, 0, 0, i] for i in range(4)]])
        >>> assignment = ms.tpu.DeviceAssignment.build(mesh, computation_shape=[1, 1, 1, 2], num_replicas=2)
        >>> assignment.core_assignment.shape, assignment.coordinates(replica=1, logical_core=0)
        ((2, 2, 4), (0, 0, 0, 2))
        >>> assignment.lookup_replicas(task_id=0, logical_core=1), assignment.tpu_ordinal(1, 1)
        ([0, 1], 3)

    Example:
        >>> mesh = ms.tpu.Topology(mesh_shape=[1, 1, 1, 4], device_coordinates=[[[0, 0, 0, i] for i in range(4)]])
        >>> assignment = ms.tpu.DeviceAssignment.build(mesh, computation_shape=[1, 1, 1, 2], num_replicas=2)
        >>> assignment.topology == mesh, assignment.num_replicas, assignment.num_cores_per_replica
        (True, 2, 2)
    """

    def __init__(
        self, topology: TpuTopology, core_assignment: Sequence[Any] | NDArray[Any]
    ) -> None:
        cores = as_coordinates("core_assignment", core_assignment, "replicas, cores per replica")
        self._topology = _check_topology(topology)
        self._core_assignment = cores
        self._replicas: dict[tuple[int, int], list[int]] = {}
        for replica, of_replica in enumerate(cores.tolist()):
            for logical_core, coordinates in enumerate(of_replica):
                task = topology.task_ordinal_at_coordinates(coordinates)
                self._replicas.setdefault((task, logical_core), []).append(replica)

    @classmethod
    def build(
        cls,
        topology: TpuTopology | bytes,
        computation_shape: Sequence[int] | NDArray[Any] | None = None,
        computation_stride: Sequence[int] | NDArray[Any] | None = None,
        num_replicas: int = 1,
        device_order_mode: DeviceOrderMode | str | int = DeviceOrderMode.AUTO,
    ) -> DeviceAssignment:
        """Choose cores for `num_replicas` replicas: each replica gets a box of `computation_shape` cores.

        The replicas form a grid that is as near to a cube as the mesh allows.

        Args:
            topology: a `Topology`, or the bytes that `Topology.serialized()` returns.
            computation_shape: number of cores of a replica along x, y, z and the cores of a chip; None is one core.
            computation_stride: distance between a replica's cores along each axis; None is 1. Other replicas may get
                the cores between.
            num_replicas: from 0 to the number of replicas that fit into the mesh.
            device_order_mode: a `DeviceOrderMode`, or its name or number. RING needs replicas of whole chips, a stride
                of 1, and as many replicas as fit into the mesh. Even with RING, chips get the order of coordinates if
                their box has an odd length above 1. If coordinates of the mesh have no device, every mode takes the
                cores in the order of tasks and devices.
        Returns: a new assignment. Replicas and logical cores are numbered in the order of `device_order_mode`.
        Raises: ValueError if the replicas do not fit into the mesh, or if RING's conditions are not met.
        """
        if isinstance(topology, bytes):
            topology = TpuTopology(serialized=topology)
        mesh = tuple(_check_topology(topology).mesh_shape.tolist())
        shape = _lengths("computation_shape", computation_shape)
        stride = _lengths("computation_stride", computation_stride)
        room = _room(mesh, shape, stride)
        mode = _mode(device_order_mode)
        num_replicas = operator.index(num_replicas)
        if not 0 <= num_replicas <= math.prod(room):
            raise ValueError(
                f"{num_replicas} replicas of {math.prod(shape)} cores were asked for (computation_shape "
                f"{list(shape)}, computation_stride {list(stride)}); the mesh {list(mesh)} has room for "
                f"{math.prod(room)}: ask for 0 to {math.prod(room)} replicas, or for fewer cores per replica"
            )
        if topology.num_missing_devices:
            return cls(topology, _by_device(topology, shape, stride, num_replicas))
        whole_chips = shape[3] == mesh[3]
        no_room_left = num_replicas == math.prod(room)
        in_rings = whole_chips and no_room_left and math.prod(stride) == 1
        if mode == DeviceOrderMode.RING and not in_rings:
            raise ValueError(
                f"RING needs replicas that take whole chips ({mesh[3]} cores; computation_shape has {shape[3]}), a "
                f"stride of 1 (it is {list(stride)}), and as many replicas as there is room for ({math.prod(room)}; "
                f"{num_replicas} were asked for): use AUTO or MESH"
            )
        grid = _replica_grid(num_replicas, room)
        if in_rings and mode != DeviceOrderMode.MESH:
            return cls(topology, _nested_rings(shape, grid))
        return cls(topology, _blocks(shape, stride, grid)[:num_replicas])

    @property
    def topology(self) -> TpuTopology:
        """The mesh that has the cores."""
        return self._topology

    @property
    def num_replicas(self) -> int:
        """The number of replicas that have cores."""
        return self._core_assignment.shape[0]

    @property
    def num_cores_per_replica(self) -> int:
        """The number of cores of each replica."""
        return self._core_assignment.shape[1]

    @property
    def core_assignment(self) -> NDArray[np.int32]:
        """The coordinates of all cores: read-only int32 of shape [replicas, cores per replica, 4].

        The last axis is (x, y, z, core on the chip).
        """
        return self._core_assignment

    def coordinates(self, replica: int, logical_core: int) -> tuple[int, ...]:
        """Return (x, y, z, core on the chip) of a replica's core.

        Raises: ValueError if there is no replica `replica`, or if it has no core number `logical_core`.
        """
        has_replica = 0 <= replica < self.num_replicas
        has_core = 0 <= logical_core < self.num_cores_per_replica
        if not (has_replica and has_core):
            raise ValueError(
                f"no logical core {logical_core} of replica {replica}: there are {self.num_replicas} replicas of "
                f"{self.num_cores_per_replica} cores, counted from 0"
            )
        return tuple(self._core_assignment[replica, logical_core].tolist())

    def lookup_replicas(self, task_id: int, logical_core: int) -> list[int]:
        """Return the numbers of the replicas, ascending, that have their core `logical_core` on task `task_id`.

        Raises: ValueError if there is no such replica.
        """
        if (task_id, logical_core) not in self._replicas:
            raise ValueError(
                f"no replica has its logical core {logical_core} on task {task_id}: "
                f"{self.num_replicas} replicas of {self.num_cores_per_replica} cores use the tasks "
                f"{sorted({task for task, _ in self._replicas})}"
            )
        return list(self._replicas[task_id, logical_core])

    def tpu_ordinal(self, replica: int = 0, logical_core: int = 0) -> int:
        """Return the number of a core's device among the devices of its task, from 0.

        Raises: ValueError if there is no replica `replica`, or if it has no core number `logical_core`.
        """
        coordinates = self.coordinates(replica, logical_core)
        return self._topology.tpu_device_ordinal_at_coordinates(coordinates)

    def host_device(self, replica: int = 0, logical_core: int = 0, job: str | None = None) -> str:
        """Return the name of the host that drives this core, such as "/job:worker/task:1/device:CPU:0".

        Without `job`, the name begins with "/task:". Raises: ValueError if there is no such replica or core.

        Example:
            >>> topology = ms.tpu.Topology(mesh_shape=[1, 1, 1, 1], device_coordinates=[[[0, 0, 0, 0]]])
            >>> ms.tpu.DeviceAssignment.build(topology).host_device(job="worker")
            '/job:worker/task:0/device:CPU:0'
        """
        coordinates = self.coordinates(replica, logical_core)
        return self._topology.cpu_device_name_at_coordinates(coordinates, job)

    def tpu_device(self, replica: int = 0, logical_core: int = 0, job: str | None = None) -> str:
        """Return the name of the TPU device of this core, such as "/job:worker/task:1/device:TPU:3".

        Without `job`, the name begins with "/task:". Raises: ValueError if there is no such core.

        Example:
            >>> topology = ms.tpu.Topology(mesh_shape=[1, 1, 1, 1], device_coordinates=[[[0, 0, 0, 0]]])
            >>> ms.tpu.DeviceAssignment.build(topology).tpu_device(replica=0, logical_core=0)
            '/task:0/device:TPU:0'
        """
        coordinates = self.coordinates(replica, logical_core)
        return self._topology.tpu_device_name_at_coordinates(coordinates, job)

    def __repr__(self) -> str:
        return (
            f"DeviceAssignment({self.num_replicas} replicas of {self.num_cores_per_replica} cores on "
            f"{self._topology})"
        )


def _check_topology(topology: object) -> TpuTopology:
    if not isinstance(topology, TpuTopology):
        raise ValueError(f"topology must be a mpistrat.tpu.Topology, got {topology!r:.60}")
    return topology


def _lengths(name: str, value: Sequence[int] | NDArray[Any] | None) -> Lengths:
    if value is None:
        return (1,) * MESH_RANK
    return tuple(as_lengths(name, value, "cores of a chip").tolist())


def _mode(mode: DeviceOrderMode | str | int) -> DeviceOrderMode:
    names = DeviceOrderMode.__members__
    if isinstance(mode, str) and mode.upper() in names:
        return names[mode.upper()]
    if isinstance(mode, int) and mode in DeviceOrderMode.__members__.values():
        return DeviceOrderMode(mode)
    raise ValueError(f"device_order_mode must be one of {', '.join(names)}; got {mode!r:.60}")


def _room(mesh: Lengths, shape: Lengths, stride: Lengths) -> Lengths:
    """Return the number of replicas that fit along x, y, z and the cores of a chip.

    Raises: ValueError if not even one replica fits into the mesh.
    """
    footprint = np.multiply(shape, stride)
    if (footprint > mesh).any():
        raise ValueError(
            f"a replica does not fit: computation_shape {list(shape)} with computation_stride {list(stride)} spans "
            f"{footprint.tolist()} cores, and the mesh is {list(mesh)}: make each product at most the mesh's length"
        )
    return tuple((mesh // footprint * stride).tolist())


def _replica_grid(num_replicas: int, room: Lengths) -> Lengths:
    """Return the number of replicas along x, y, z and the cores of a chip; their product is at least `num_replicas`.

    The grid is as near to a cube as `room` allows. The axis with the least room gets its number first, so that the
    other axes have room for the remaining replicas. Among axes with equal room, the cores of a chip come first, so that
    neighbouring replicas share chips; then x, so that neighbours share hosts.
    """
    grid = [1] * MESH_RANK
    remaining = num_replicas
    by_preference = [3, 0, 1, 2]  # the cores of a chip, x, y, z
    by_preference.sort(key=lambda axis: room[axis])
    for axes_done, axis in enumerate(by_preference):
        axes_left = MESH_RANK - axes_done
        length = 1
        while length < room[axis] and length**axes_left < remaining:
            length += 1
        grid[axis] = length
        remaining = math.ceil(remaining / length)
    return tuple(grid)


def _blocks(shape: Lengths, stride: Lengths, grid: Lengths) -> NDArray[np.int64]:
    """Return the coordinates of the cores of all replicas in `grid`, in the order of coordinates.

    Replicas are numbered along the cores of a chip first, then x, y and z. With a stride, neighbouring replicas take
    turns: one replica has every stride-th core of a block, and the next replicas have the cores between.

    Args: grid: number of replicas along x, y, z and the cores of a chip.
    Returns: integers of shape [replicas, cores per replica, 4]; the last axis is (x, y, z, core on the chip).
    """
    along_x, along_y, along_z, on_chip = grid
    numbers = np.indices((along_z, along_y, along_x, on_chip))
    z, y, x, core = numbers.reshape(MESH_RANK, -1)
    place = np.stack([x, y, z, core], axis=-1)
    block, offset = np.divmod(place, stride)
    starts = block * np.multiply(shape, stride) + offset
    cores = np.indices(shape).reshape(MESH_RANK, -1).T * stride
    return starts[:, np.newaxis] + cores


def _nested_rings(shape: Lengths, grid: Lengths) -> NDArray[np.int64]:
    """Return the coordinates of the cores of all replicas, so that replicas form a ring, and a replica's chips too.

    Each replica is a box of whole chips. The cores of a chip follow each other.

    Args: grid: number of replicas along x, y, z and the cores of a chip.
    Returns: integers of shape [replicas, cores per replica, 4]; the last axis is (x, y, z, core on the chip).
    """
    starts = ring_order(grid[:3]) * shape[:3]
    chips = starts[:, np.newaxis] + ring_order(shape[:3])
    of_cores = np.repeat(chips, shape[3], axis=1)
    num_replicas, num_cores, _ = of_cores.shape
    cores = np.arange(num_cores)[:, np.newaxis] % shape[3]
    cores = np.broadcast_to(cores, (num_replicas, num_cores, 1))
    return np.concatenate([of_cores, cores], axis=-1)


def _by_device(
    topology: TpuTopology, shape: Lengths, stride: Lengths, num_replicas: int
) -> NDArray[np.int32]:
    """Return the cores of each replica: the topology's devices, by task and then by device number, dealt out in order.

    Used for a mesh with coordinates that have no device; a replica's cores need not be neighbours.
    Args:
        shape: the computation shape, the box of one replica's cores; only its number of cores counts.
        stride: the computation stride, the distances between a replica's cores; all must be 1.
    Returns: integers of shape [replicas, cores per replica, 4]; the last axis is (x, y, z, core on the chip).
    Raises: ValueError if a number of `stride` is not 1, or if there are fewer devices than the replicas need.
    """
    if math.prod(stride) != 1:
        raise ValueError(
            f"computation_stride is {list(stride)}, and this mesh has places without a device: there it must be 1"
        )
    cores = math.prod(shape)
    present = topology.num_tasks * topology.num_tpus_per_task
    if num_replicas * cores > present:
        raise ValueError(
            f"{num_replicas} replicas of {cores} cores need {num_replicas * cores}; of the mesh "
            f"{topology.mesh_shape.tolist()} {present} are there: ask for 0 to {present // cores} replicas, or for "
            f"fewer cores per replica"
        )
    devices = topology.device_coordinates.reshape(-1, MESH_RANK)
    return devices[: num_replicas * cores].reshape(num_replicas, cores, MESH_RANK)


def ring_order(shape: Sequence[int]) -> NDArray[np.int64]:
    """Return the chips of a box in the order of a ring, or sorted by z, then y, then x.

    The ring begins at (0, 0, 0); each chip is a neighbour of the next chip, and the last chip of the first. The chips
    are sorted if the box has an odd length above 1, or is one line of chips. (Only a torus links the ends of a line.)

    Args: shape: number of chips along x, y and z.
    Returns: integers of shape [chips, 3]; the last axis is (x, y, z).
    """
    lengths = np.asarray(shape)
    long = lengths[lengths > 1]
    if len(long) < 2 or (long % 2).any():
        z, y, x = np.indices(shape[::-1]).reshape(3, -1)
        return np.stack([x, y, z], axis=-1)
    axes = np.argsort(lengths == 1, kind="stable")  # in a plane, the axis of length 1 comes last
    ring = np.array(_ring(*lengths[axes].tolist()))
    return ring[:, np.argsort(axes)]


def _ring(width: int, height: int, depth: int) -> list[Chip]:
    """Return the chips (x, y, z) of a box of even lengths (`depth` may be 1) as a ring that begins at (0, 0, 0).

    The ring goes through the layers z = 0, 1, … and returns along the chips (0, 0, z). The picture shows the order of
    the chips in layer 0 of 4 × 4 chips; the next layer has them backwards, from 15 to 1:

        0    1    2    3
        15   6    5    4
        14   7    8    9
        13   12   11   10
    """
    row = [(x,) for x in range(1, width)]
    return [(0, 0, 0), *_there_and_back(_there_and_back(row, height), depth)]


def _there_and_back(path: Sequence[Chip], layers: int) -> list[Chip]:
    """Return the chips of `path` in each layer, each with its layer's number as one more coordinate.

    Every second layer is passed backwards. Then come the chips at coordinates 0, from the last layer down to layer 1.
    """
    up = []
    for layer in range(layers):
        up += [(*chip, layer) for chip in path]
        path = path[::-1]
    corner = (0,) * len(path[0])
    down = [(*corner, layer) for layer in reversed(range(1, layers))]
    return up + down
