"""A strategy with a copy of every variable on each replica of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mpistrat.cluster_resolver import ClusterResolver, MPIClusterResolver
from mpistrat.cluster_resolver.roles.task_claims import resolver_of_trainers
from mpistrat.communicators.of_resolver import communicator_of
from mpistrat.machine.devices import check_devices
from mpistrat.options import CommunicationOptions
from mpistrat.strategies import strategy_parts
from mpistrat.strategies.strategy_arguments import StrategyArguments
from mpistrat.strategy import Strategy

if TYPE_CHECKING:
    from mpi4py import MPI


class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous replicas on all ranks of all nodes; `python train.py` is one rank.

    Called by: every rank of the job (or of `comm`).
    Args:
        cluster_resolver: names the ranks that take part. None asks MPI. If TF_CONFIG names this rank's task, and there
            is no `comm`, TF_CONFIG decides. MPI carries the bytes, so TF_CONFIG, or a resolver of another kind, is
            checked against MPI.
        communication_options: defaults of every collective.
        devices: this rank's devices, one replica each. None: one replica on the rank's own device: an accelerator of
            the node, or else the CPU. Torch modules take the first device for all replicas.
        comm: the mpi4py communicator of the ranks that take part; None: all ranks.
        gradients: whether `backward()` leaves the "sum" (scale the loss with `compute_average_loss`) or the "mean"
            (like DDP) of the replicas' gradients in `.grad`. None: the first loss decides.
        check: "always" lets the ranks agree on each collective before its bytes move. With "never", ranks that call
            different collectives get wrong results or an error of MPI, or wait until the stall is reported.
        deterministic: whether results do not depend on how replicas are spread over ranks. Sums over replicas then have
            the same bits, each rank computes with OMP_NUM_THREADS threads, or with 1, and replica i reads part i of
            each global batch. Ranks may have different numbers of devices. If False, the parts of a batch are dealt out
            to the ranks in turn, as in TensorFlow; with one replica per rank this gives replica i part i, too.
        shared_parameters: whether the ranks of a node keep one copy, on the CPU, of the parameters of torch modules, of
            the gradients and of the optimizer's state. Each rank then updates a slice of the parameters, if the
            optimizer updates element by element; with other optimizers each rank computes whole steps. If memory cannot
            be shared, each rank has its own copy, and a warning says so. Parameters that are views of one storage are
            not shared: they stay in one storage on each rank. Needs one replica per rank.
        torch_distributed: whether torch's default group is over the strategy's ranks: the program's group, or else a
            group of the backend "mpistrat" that the strategy makes. Libraries that ask torch.distributed, such as
            torchmetrics, then work over these ranks. Under `mpistrat run` a strategy makes the group without being
            asked, if there is none.
    Raises:
        TopologyError: on all ranks, if MPI, the launcher and the resolver or TF_CONFIG disagree about ranks.
        ValueError: on all ranks, if the resolver or TF_CONFIG name no task that trains.
        RuntimeError: on all ranks, with `torch_distributed=True`, if the program's default group is over other ranks.

    Example:
        >>> strategy = ms.MultiWorkerMirroredStrategy(devices=["cpu:0"], gradients="mean")
        >>> model = strategy.prepare(torch.nn.Linear(2, 1))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> strategy.rank, strategy.world_size, strategy.num_replicas_in_sync
        (0, 1, 1)

    Example, on several ranks::

        def step(inputs, targets):  # one replica's work, with the model and the optimizer from above
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()  # .grad is the mean over all ranks
            optimizer.step()
        for batch in strategy.experimental_distribute_dataset(loader):
            strategy.run(step, args=batch)
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        devices: Sequence[str] | None = None,
        comm: MPI.Intracomm | None = None,
        gradients: str | None = None,
        check: str = "always",
        deterministic: bool = False,
        shared_parameters: bool = False,
        torch_distributed: bool = False,
    ) -> None:
        asked = StrategyArguments(
            communication_options,
            gradients,
            check,
            torch_distributed,
            deterministic,
            shared_parameters,
        )
        if not isinstance(cluster_resolver, ClusterResolver | None):
            raise ValueError(
                f"cluster_resolver must be a ClusterResolver, got {cluster_resolver!r:.60}"
            )
        checked = check_devices(devices)
        over_mpi = cluster_resolver
        if not isinstance(over_mpi, MPIClusterResolver):
            over_mpi = MPIClusterResolver(comm)
        topology = over_mpi.topology()
        name = type(self).__name__
        communicator = communicator_of(over_mpi, check, name)

        def gather(value: Any) -> list[Any]:
            return communicator.all_gather_object(value, label=f"constructor of {name}")

        named = resolver_of_trainers(
            topology, gather, cluster_resolver, asks_tf_config=comm is None
        )
        group = strategy_parts.agree(
            name, topology, communicator, checked, asked, comm=lambda: over_mpi.comm
        )
        extended = strategy_parts.mirrored(self, group, asked, ranks_are_workers=True)
        super().__init__(extended, named or over_mpi)
