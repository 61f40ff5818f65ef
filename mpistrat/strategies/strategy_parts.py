"""Puts together the parts of strategies whose replicas keep variables themselves.

`parameter_server.strategies.server_strategy_parts` and `xla.tpu_strategy_parts` do the same for other strategies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpistrat.communicators import Communicator
from mpistrat.communicators.local import LocalCommunicator
from mpistrat.errors import CollectiveMismatchError
from mpistrat.liveness.ending import early_signals
from mpistrat.options import implementation_of
from mpistrat.pytorch.metrics import warn_of_metrics_of
from mpistrat.replicas.cross_replica_ops import CrossReplicaOps
from mpistrat.replicas.gradient_rule import GradientRule
from mpistrat.replicas.group import ReplicaGroup
from mpistrat.replicas.input_plan import InputPlan, Share
from mpistrat.replicas.replicas import Replicas
from mpistrat.replicas.strategy_extended import Parts
from mpistrat.replicas.torch_modules import ModuleParts, TorchModules
from mpistrat.strategies.binding import bind
from mpistrat.strategies.replicated import ReplicatedExtended
from mpistrat.strategies.replicated_variables import CopyPerNode, CopyPerReplica, PlainVariables
from mpistrat.strategies.strategy_arguments import StrategyArguments
from mpistrat.strategies.threads import share_cores
from mpistrat.topology import Topology
from mpistrat.torch_distributed import default_group
from mpistrat.torch_distributed.tracing import trace_ranges
from mpistrat.variables.store import VariableStore

_NO_ARGUMENTS = StrategyArguments()


def agree(
    what: str,
    topology: Topology,
    communicator: Communicator,
    devices: Sequence[str] | None,
    asked: StrategyArguments,
    comm: Callable[[], Any] | None = None,
) -> ReplicaGroup:
    """Agree with the other ranks on a strategy of class `what`, and share out the node's cores and GPUs.

    If `comm` is given and `asked` has `torch_distributed=True`, torch's default group is over these ranks afterwards.
    The same holds under `mpistrat run` if there was no default group.

    Called by: every rank of `communicator`, in the strategy's constructor.
    Args:
        what: the name of the strategy's class.
        topology: the topology of the ranks of `communicator`; or of ranks on several nodes, if `communicator` has
            exactly this node's ranks.
        devices: this rank's devices, if the program has chosen them, else None.
        asked: the arguments of the strategy's constructor.
        comm: returns the mpi4py communicator of these ranks, for torch's default group. None: the default group is
            neither made nor checked.
    Returns: the replicas that the strategy combines, with this rank's devices.
    Raises:
        CollectiveMismatchError: on all ranks, if they make different strategies, or, without `deterministic`, have
            different numbers of devices.
        RuntimeError: on all ranks, with `torch_distributed=True`, if the program's default group is over other ranks.
        ValueError: with `shared_parameters`, in three cases: this rank has several replicas; `deterministic` is set;
            there is a wire format.
    """
    replicas = 1 if devices is None else len(devices)
    if asked.shared_parameters:
        asked.check_shared_parameters(replicas)
    early_signals.keep()
    communicator.barrier(label=f"constructor of {what}, {asked}")
    threads = share_cores(communicator, topology, asked.deterministic)
    trace_ranges(communicator)
    replicas_of_ranks = tuple(communicator.all_gather_object(replicas, label="replicas"))
    if not asked.deterministic and len(set(replicas_of_ranks)) > 1:
        by_rank = ", ".join(f"rank {r} with {k} replicas" for r, k in enumerate(replicas_of_ranks))
        raise CollectiveMismatchError(
            f"the ranks made a {what} with different numbers of devices: {by_rank}. Give each rank equally many, or "
            "use deterministic=True"
        )
    implementation = implementation_of(asked.options)
    by_mpi = implementation.name in ("MPI", "RING")  # the program has chosen it
    bound = bind(communicator, topology, devices, quiet=by_mpi)
    if comm is not None and (asked.torch_distributed or default_group.is_wanted()):
        default_group.share_default_group(what, comm(), communicator)
    if communicator.size < topology.size:
        topology = topology.part(topology.ranks_on_node(topology.node))
    return ReplicaGroup(
        communicator.by(implementation), bound, replicas_of_ranks, threads, topology
    )


def mirrored(
    strategy: Any,
    group: ReplicaGroup,
    asked: StrategyArguments = _NO_ARGUMENTS,
    *,
    ranks_are_workers: bool = False,
) -> ReplicatedExtended:
    """Return the `extended` of a strategy with a copy of every variable on each replica.

    Args:
        ranks_are_workers: whether each rank is a worker, a reader of input for its own replicas. If False, all ranks
            together are one worker.
    """
    ops = CrossReplicaOps(group, asked.cross_device_ops, asked.options)
    variables = CopyPerReplica(strategy, ops, group.worker_devices)
    plan = input_plan(group, ranks_are_workers, per_replica=not ranks_are_workers)
    parts = _parts(Replicas(strategy, group, ops), variables, plan, asked)
    return ReplicatedExtended(strategy, parts._replace(between_graph=ranks_are_workers))


def central_storage(
    strategy: Any, group: ReplicaGroup, parameter_device: str, asked: StrategyArguments
) -> ReplicatedExtended:
    """Return the `extended` of a strategy with one copy of every variable, on `parameter_device`, per node.

    Called by: the constructor of `CentralStorageStrategy`.
    """
    ops = CrossReplicaOps(group, options=asked.options)
    variables = CopyPerNode(strategy, ops, parameter_device, group.worker_devices)
    plan = input_plan(group, False, per_replica=True)
    replicas = Replicas(strategy, group, ops, parameter_device=parameter_device)
    parts = _parts(replicas, variables, plan, asked)
    return ReplicatedExtended(strategy, parts._replace(between_graph=True))


def one_replica(strategy: Any, device: str) -> Parts:
    """Return the parts of a strategy with one replica on `device`. Values and variables are not wrapped.

    Called by: `OneDeviceStrategy` and the default strategy. Sends nothing.
    """
    group = ReplicaGroup(LocalCommunicator(), (device,), (1,))
    plan = input_plan(group, False)
    replicas = Replicas(strategy, group, CrossReplicaOps(group))
    parts = _parts(replicas, PlainVariables(strategy, device), plan)
    return parts._replace(wraps_values=False)


def _parts(
    replicas: Replicas,
    variables: VariableStore,
    plan: InputPlan,
    asked: StrategyArguments = _NO_ARGUMENTS,
) -> Parts:
    if replicas.group.communicator.size > 1:
        warn_of_metrics_of(replicas.strategy)
    used = ModuleParts(replicas, GradientRule(asked.gradients))
    return Parts(mirrored_modules(used, asked.shared_parameters), variables, plan)


def input_plan(
    group: ReplicaGroup,
    ranks_are_workers: bool,
    *,
    per_replica: bool = False,
) -> InputPlan:
    """Return the plan by which this rank reads its input.

    Args:
        ranks_are_workers: whether each rank is a worker, a reader of input for its own replicas. If False, all ranks
            together are one worker.
        per_replica: whether a dataset function may be called once for each replica.
    """
    ranks = group.communicator.size
    rank = group.communicator.rank
    total = group.num_replicas_in_sync
    k = group.num_local_replicas
    first = group.first_replica_id
    if ranks_are_workers:
        first_in_order = first if group.deterministic else None
        share = Share(ranks, rank, total, range(k), first_in_order)
    else:
        share = Share(1, 0, total, range(first, first + k))
    return InputPlan(share, (ranks, rank), group.worker_devices, per_replica=per_replica)


def mirrored_modules(parts: ModuleParts, shared_parameters: bool = False) -> TorchModules:
    """Return a `TorchModules` for a strategy that keeps parameters and buffers of modules equal on all replicas.

    Args: shared_parameters: whether the ranks of a node share one copy of the parameters.
    """

    def make(parts: ModuleParts) -> Any:
        from mpistrat.pytorch.mirroring import Mirroring

        return Mirroring(parts, shared_parameters, watches=True)

    are_placed = parts.replicas.device_of_modules is not None
    needed = are_placed or parts.group.num_replicas_in_sync > 1
    modules = TorchModules(parts, make, needed)
    if modules.are_seen:
        modules.get()  # it also sees modules that train without scope() and run
    return modules
