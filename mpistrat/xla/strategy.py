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
    """Synchronous replicas on TPU cores: one rank per chip, or one rank per host with a replica on each of its cores.

    `run` records the function's operations, and XLA compiles them into one graph for each set of shapes. If XLA does
    not connect the ranks, XLA compiles two graphs. After the first graph, the ranks sum gradients through host memory
    and MPI; the second graph continues with the sums.
    Shapes must not depend on values. The function must not read a value: return the tensor, and read it after `run`.
    Returned tensors have no autograd history, so call `backward()` inside the function. Torch modules of the scope,
    variables, and batches of distributed datasets are on the rank's device. A rank with several cores calls the
    function once for all of them, with the shapes of one replica.

    Called by: every rank of the job (or of `comm`).
    Args:
        tpu_cluster_resolver: names the slice (TPU chips that are linked); None is the slice of this host.
        experimental_device_assignment: the cores of each replica; None makes each core a replica. A replica's cores are
            its logical devices.
        comm: the mpi4py communicator of the ranks that take part; None is all ranks.
        communication_options: the options of every collective that is given none.
        gradients: "sum" or "mean": `backward()` leaves the sum (scale the loss with `compute_average_loss`) or the mean
            (as DDP does) of the replicas' gradients in `.grad`.
        check: "always" makes the ranks agree on each collective before its bytes move. With "never", ranks that call
            different collectives get wrong results or an MPI error, or wait until the stall is reported.
    Raises: ValueError for a wrong argument, for ranks that do not fit the hosts, and for an assignment that the ranks
        cannot run; NotFoundError if this is no TPU host; TopologyError if the ranks' hosts contradict each other;
        ImportError if torch_xla is missing or is built against another torch version; RuntimeError if XLA finds no
        device.

    Example, on a TPU::

        strategy = ms.TPUStrategy(ms.cluster_resolver.TPUClusterResolver())
        with strategy.scope():
            model = torch.nn.Linear(8, 1)
        for batch in strategy.experimental_distribute_dataset(loader):
            loss = strategy.run(train_step, args=(batch,))
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
        resolver = tpu_cluster_resolver
        assignment = experimental_device_assignment
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

        device = replicas[0][0]
        several = len(replicas) * len(replicas[0]) > 1
        if several:
            device = 0  # stands for all cores, because one program runs on them
            system.runtime.use_spmd()
            system.runtime.cores_of_ranks = system.cores_of_ranks
        devices = [f"xla:{device}"] * len(replicas)
        group = strategy_parts.agree(type(self).__name__, topology, communicator, devices, asked)
        extended = on_xla(self, group, asked, system, len(replicas[0]))
        super().__init__(extended, resolver or over_mpi)
        self._logical_devices = extended.logical_devices

    def experimental_assign_to_logical_device(self, tensor: Any, logical_device_id: int) -> Any:
        """Put `tensor` on a logical device of the replica. torch_xla cannot, so all logical devices get the tensor.

        Called by: a replica, or for a parameter the program outside `run`.
        Args: logical_device_id: from 0 to the number of the replica's logical devices - 1.
        Returns: a copy on all logical devices. With one logical device, or for a parameter outside `run`, `tensor`
            itself.
        Raises: ValueError if the replica has no device `logical_device_id`; with several logical devices also if
            `tensor` is not on XLA devices.

        Example, on a TPU::

            assignment = ms.tpu.DeviceAssignment.build(topology, computation_shape=[1, 1, 1, 2])
            strategy = ms.TPUStrategy(experimental_device_assignment=assignment)
            hidden = strategy.experimental_assign_to_logical_device(hidden, 1)
        """
        return self._logical_devices.assign(tensor, logical_device_id)

    def experimental_split_to_logical_devices(
        self, tensor: Any, partition_dimensions: Sequence[int]
    ) -> Any:
        """Cut `tensor` into one part for each of the replica's logical devices.

        Called by: a replica, or for a parameter the program outside `run`; the parameter itself is then cut.
        Args: partition_dimensions: for each dimension of `tensor`, the number of parts; the product of the numbers is
            the number of logical devices.
        Returns: a copy that is cut. With one logical device, or for a parameter outside `run`, `tensor` itself.
        Raises: ValueError if a number does not divide its dimension, or if the product is not the number of logical
            devices; with several logical devices also if `tensor` is not on XLA devices.

        Example, on a TPU::

            assignment = ms.tpu.DeviceAssignment.build(topology, computation_shape=[1, 1, 1, 2])
            strategy = ms.TPUStrategy(experimental_device_assignment=assignment)
            images = strategy.experimental_split_to_logical_devices(images, [1, 1, 2, 1])
        """
        return self._logical_devices.split(tensor, partition_dimensions)

    def experimental_replicate_to_logical_devices(self, tensor: Any) -> Any:
        """Put the whole `tensor` on each of the replica's logical devices.

        Called by: a replica, or for a parameter the program outside `run`.
        Returns: a copy on all logical devices. With one logical device, or for a parameter outside `run`, `tensor`
            itself.
        Raises: ValueError if there are several logical devices, and `tensor` is not on XLA devices.

        Example, on a TPU::

            assignment = ms.tpu.DeviceAssignment.build(topology, computation_shape=[1, 1, 1, 2])
            strategy = ms.TPUStrategy(experimental_device_assignment=assignment)
            weights = strategy.experimental_replicate_to_logical_devices(weights)
        """
        return self._logical_devices.replicate(tensor)
