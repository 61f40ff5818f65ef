"""Replicas on the cores of TPUs, through XLA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mpistrat.cluster_resolver import MPIClusterResolver, TPUClusterResolver
from mpistrat.communicators.of_resolver import communicator_of
from mpistrat.options import CommunicationOptions
from mpistrat.strategies import strategy_parts
from mpistrat.strategies.strategy_arguments import StrategyArguments
from mpistrat.strategy import Strategy
from mpistrat.xla.placement import replicas_of_rank
from mpistrat.xla.system import start_system
from mpistrat.xla.topology.device_assignment import DeviceAssignment

if TYPE_CHECKING:
    from mpi4py import MPI


class TPUStrategy(Strategy):
    """Synchronous replicas on TPU cores: one rank per chip, or one per host with a replica on each of its cores.

    Called by: every rank of the job (or of `comm`).

    `run` records what the function does, and XLA compiles that into one graph, once for each set of shapes; with ranks
    that XLA does not connect into two, between which gradients are summed through host memory and MPI. Shapes must not
    depend on values, and the function must not read a value: return it, and read it afterwards. What it returns is cut
    off from autograd: `backward()` belongs into the function. Torch modules of the scope, variables and the batches of
    distributed datasets are on the rank's device. A rank with several cores calls the function once for all of them,
    with the shapes of one replica.

    Args:
        tpu_cluster_resolver: the slice; None is the one that this host belongs to.
        experimental_device_assignment: which cores each replica has; None has each core be a replica.
        comm: the mpi4py communicator of the ranks that take part; None is all.
        communication_options: defaults of every collective.
        gradients: whether `backward()` leaves the "sum" (scale the loss with `compute_average_loss`) or
            the "mean" (as DDP) of the replicas' gradients in `.grad`.
        check: as of `MultiWorkerMirroredStrategy`.
    Raises: as `tpu.initialize_tpu_system`; ValueError for an assignment that the ranks cannot run.
    """

    why_no_replica_block = "XLA compiles what run records: call strategy.run(step)"

    def __init__(
        self,
        tpu_cluster_resolver: TPUClusterResolver | None = None,
        experimental_device_assignment: DeviceAssignment | None = None,
        *,
        comm: MPI.Intracomm | None = None,
        communication_options: CommunicationOptions | None = None,
        gradients: str | None = None,
        check: str = "always",
    ) -> None:
        asked = StrategyArguments(communication_options, gradients, check)
        resolver, assignment = tpu_cluster_resolver, experimental_device_assignment
        if not isinstance(resolver, TPUClusterResolver | None):
            raise ValueError(
                f"tpu_cluster_resolver must be a TPUClusterResolver, got {resolver!r:.60}"
            )
        if not isinstance(assignment, DeviceAssignment | None):
            raise ValueError(
                f"the device assignment must be a tpu.DeviceAssignment, got {assignment!r:.60}"
            )
        over_mpi = MPIClusterResolver(comm)
        topology = over_mpi.topology()
        communicator = communicator_of(over_mpi, check, type(self).__name__)
        system = start_system(resolver, topology, communicator)
        replicas = replicas_of_rank(assignment, system.topology, topology.rank)
        from mpistrat.xla.tpu_strategy_parts import on_xla

        device, several = replicas[0][0], len(replicas) * len(replicas[0]) > 1
        if several:
            device = 0  # of the one program that runs on all cores
            system.runtime.use_spmd()
            system.runtime.cores_of_ranks = system.cores_of_ranks
        devices = [f"xla:{device}"] * len(replicas)
        group = strategy_parts.agree(type(self).__name__, topology, communicator, devices, asked)
        extended = on_xla(self, group, asked, system, len(replicas[0]))
        super().__init__(extended, resolver or over_mpi)
        self._logical_devices = extended.logical_devices

    def experimental_assign_to_logical_device(self, tensor: Any, logical_device_id: int) -> Any:
        """`tensor`, for one of the replica's logical devices; all of them have it: see `LogicalDevices`.

        Called by: a replica.
        Raises: ValueError: there is no such device.
        """
        return self._logical_devices.assign(tensor, logical_device_id)

    def experimental_split_to_logical_devices(
        self, tensor: Any, partition_dimensions: Sequence[int]
    ) -> Any:
        """`tensor`, cut into parts of which each of the replica's logical devices has one; see `LogicalDevices`.

        Called by: a replica; outside `run`, of a parameter, too, which then itself is cut.
        Args: partition_dimensions: into how many parts each dimension is cut; their product is the number of devices.
        Raises: ValueError: they do not fit the tensor, or the devices.
        """
        return self._logical_devices.split(tensor, partition_dimensions)

    def experimental_replicate_to_logical_devices(self, tensor: Any) -> Any:
        """`tensor`, whole on each of the replica's logical devices. Called as the above."""
        return self._logical_devices.replicate(tensor)
