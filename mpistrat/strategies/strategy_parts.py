"""Puts together the parts of strategies whose replicas keep variables themselves.

`parameter_server.server_strategy_parts` and `xla.tpu_strategy_parts` do so for theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpistrat.cluster_resolver import ClusterResolver
from mpistrat.communicators import Communicator
from mpistrat.communicators.local import LocalCommunicator
from mpistrat.cross_device_ops import CrossDeviceOps
from mpistrat.errors import CollectiveMismatchError
from mpistrat.liveness.ending import early_signals
from mpistrat.options import CommunicationOptions, implementation_of
from mpistrat.pytorch.metrics import warn_of_metrics_of
from mpistrat.replicas.checkpoint_role import CheckpointRole
from mpistrat.replicas.cross_replica_ops import CrossReplicaOps
from mpistrat.replicas.gradient_rule import GradientRule
from mpistrat.replicas.group import ReplicaGroup
from mpistrat.replicas.input_plan import InputPlan, Share
from mpistrat.replicas.replica_context import ReplicaContext
from mpistrat.replicas.replicas import Replicas
from mpistrat.replicas.strategy_extended import Parts
from mpistrat.replicas.torch_modules import ModuleParts, TorchModules
from mpistrat.strategies.binding import bind
from mpistrat.strategies.replicated import ReplicatedExtended
from mpistrat.strategies.replicated_variables import CopyPerNode, CopyPerReplica, PlainVariables
from mpistrat.strategies.strategy_arguments import StrategyArguments
from mpistrat.strategies.threads import share_cores
from mpistrat.strategies.tracing import trace_ranges
from mpistrat.topology import Topology
from mpistrat.torch_distributed import default_group
from mpistrat.variables.store import VariableStore
from mpistrat.wire_formats import name_of

_NOTHING_ASKED = StrategyArguments()


def communicator_of(resolver: ClusterResolver, check: str, what: str) -> Communicator:
    """Our communicator, for a strategy of class `what`, over the ranks that an `MPIClusterResolver` speaks of."""
    comm = getattr(resolver, "comm", None)
    if comm is None:
        return LocalCommunicator()
    from mpistrat.communicators.construction import communicator_for

    return communicator_for(comm, check, f"constructor of {what}")


def agree(
    what: str,
    topology: Topology,
    communicator: Communicator,
    devices: Sequence[str] | None,
    asked: StrategyArguments,
    comm: Callable[[], Any] | None = None,
) -> ReplicaGroup:
    """Agree with the other ranks on a strategy of class `what`, and share out the cores and the GPUs.

    With `torch_distributed=True`, and under `mpistrat run`, torch's default group is over these ranks.

    Called by: every rank of `communicator`.
    Args:
        topology: of these ranks, or of more: then they are those of a node.
        comm: gives mpi4py's communicator of these ranks, if torch's default group wants it; None: it never does.
    Raises:
        CollectiveMismatchError: on all ranks, when they make different strategies.
        RuntimeError: on all ranks, with `torch_distributed=True`, when the program's own group is over others.
        ValueError: parameters are to be shared by several replicas of a rank, or with a wire format.
    """
    options, deterministic = asked.options, asked.deterministic
    replicas = 1 if devices is None else len(devices)
    if asked.shared_parameters:
        _check_shared_parameters(replicas, asked)
    sharing = ", shared_parameters=True" if asked.shared_parameters else ""
    sharing += ", torch_distributed=True" if asked.torch_distributed else ""
    wire = "" if options is None or options.wire_format is None else name_of(options.wire_format)
    early_signals.keep()
    communicator.barrier(
        label=f"constructor of {what}, gradients={asked.gradients!r}{sharing}, {options} {wire}".rstrip()
    )
    threads = share_cores(communicator, topology, deterministic)
    trace_ranges(communicator)
    replicas_of_ranks = tuple(communicator.all_gather_object(replicas, label="replicas"))
    if len(set(replicas_of_ranks)) > 1 and not deterministic:
        by_rank = ", ".join(f"rank {r} with {k} replicas" for r, k in enumerate(replicas_of_ranks))
        raise CollectiveMismatchError(
            f"the ranks made a {what} with different numbers of devices: {by_rank}. With deterministic=True they may "
            "differ"
        )
    by_mpi = implementation_of(options).name in ("MPI", "RING")  # the program has chosen it
    bound = bind(communicator, topology, devices, quiet=by_mpi)
    if comm is not None and (asked.torch_distributed or default_group.is_wanted()):
        default_group.share_default_group(what, comm(), communicator)
    if communicator.size < topology.size:
        topology = topology.part(topology.ranks_on_node(topology.node))
    return ReplicaGroup(
        communicator.by(implementation_of(options)), bound, replicas_of_ranks, threads, topology
    )


def _check_shared_parameters(replicas: int, asked: StrategyArguments) -> None:
    options = asked.options
    if replicas > 1:
        raise ValueError(
            f"shared_parameters=True takes one replica per rank, got {replicas} devices; the replicas of one rank "
            "share their parameters anyway"
        )
    if asked.deterministic:
        raise ValueError(
            "shared_parameters=True adds up in the order of the ranks, deterministic=True in that of a tree; leave "
            "one of them out"
        )
    if options is not None and (options.wire_dtype or options.wire_format):
        raise ValueError(
            "shared_parameters=True sends sums between nodes as they are; leave out wire_dtype and wire_format"
        )


def mirrored(
    strategy: Any,
    group: ReplicaGroup,
    asked: StrategyArguments = _NOTHING_ASKED,
    *,
    ranks_are_workers: bool = False,
) -> ReplicatedExtended:
    """A copy of every variable on each replica.

    Args:
        ranks_are_workers: each rank reads for its own replicas; else all ranks together are one worker.
    """
    ops = ops_of(group, asked.cross_device_ops, asked.options)
    variables = CopyPerReplica(strategy, ops, group.worker_devices)
    plan = input_plan(group, ranks_are_workers, per_replica=not ranks_are_workers)
    parts = _parts(strategy, group, ops, variables, plan, asked)
    return ReplicatedExtended(strategy, parts, between_graph=ranks_are_workers)


def central_storage(
    strategy: Any,
    group: ReplicaGroup,
    parameter_device: str,
    asked: StrategyArguments,
) -> ReplicatedExtended:
    """One copy of every variable, for all replicas of a node."""
    ops = ops_of(group, None, asked.options)
    variables = CopyPerNode(strategy, ops, parameter_device, group.worker_devices)
    plan = input_plan(group, False, partial_steps=False, per_replica=True)
    parts = _parts(strategy, group, ops, variables, plan, asked, parameter_device=parameter_device)
    return ReplicatedExtended(strategy, parts, between_graph=True)


def one_replica(strategy: Any, device: str, context: ReplicaContext | None = None) -> Parts:
    """One replica. Its values are never wrapped, and its variables are plain.

    Args:
        context: the replica's; None makes it.
    """
    group = ReplicaGroup.of_equal_ranks(LocalCommunicator(), (device,))
    ops = ops_of(group, None, None)
    plan = input_plan(group, False, partial_steps=False)
    contexts = None if context is None else [context]
    return _parts(strategy, group, ops, PlainVariables(strategy, device), plan, contexts=contexts)


def _parts(
    strategy: Any,
    group: ReplicaGroup,
    ops: CrossReplicaOps,
    variables: VariableStore,
    plan: InputPlan,
    asked: StrategyArguments = _NOTHING_ASKED,
    contexts: list[ReplicaContext] | None = None,
    parameter_device: str | None = None,
) -> Parts:
    if group.communicator.size > 1:
        warn_of_metrics_of(strategy)
    replicas = Replicas(strategy, group, ops, contexts, parameter_device)
    used = ModuleParts(strategy, group, replicas, ops, GradientRule(asked.gradients))
    modules = mirrored_modules(used, asked.shared_parameters)
    return Parts(group, replicas, ops, variables, CheckpointRole(), plan, modules)


def ops_of(
    group: ReplicaGroup,
    cross_device_ops: CrossDeviceOps | None,
    options: CommunicationOptions | None,
    take_apart: Callable[[Any], tuple[Any, ...] | None] | None = None,
    kind: type[CrossReplicaOps] = CrossReplicaOps,
) -> CrossReplicaOps:
    """What combines the values of the replicas of `group`; its arguments are those of `CrossReplicaOps`."""
    return kind(
        group.communicator,
        group.replicas_of_ranks,
        cross_device_ops,
        options or CommunicationOptions(),
        group.deterministic,
        take_apart,
    )


def input_plan(
    group: ReplicaGroup,
    ranks_are_workers: bool,
    *,
    partial_steps: bool = True,
    per_replica: bool = False,
) -> InputPlan:
    """Each rank is a worker, which reads for its own replicas, or all ranks together are one."""
    communicator, first, k = group.communicator, group.first_replica_id, group.num_local_replicas
    if ranks_are_workers:
        share = Share(
            communicator.size,
            communicator.rank,
            group.num_replicas_in_sync,
            range(k),
            first=first if group.deterministic else None,
        )
    else:
        share = Share(1, 0, group.num_replicas_in_sync, range(first, first + k))
    pipelines = communicator.size, communicator.rank
    return InputPlan(share, pipelines, group.worker_devices, partial_steps, per_replica)


def mirrored_modules(parts: ModuleParts, shared_parameters: bool = False) -> TorchModules:
    """Parameters and buffers of torch modules are equal on all replicas."""

    def make(parts: ModuleParts) -> Any:
        from mpistrat.pytorch.modules.mirroring import Mirroring

        return Mirroring(parts, shared_parameters)

    are_placed = parts.replicas.device_of_modules is not None
    modules = TorchModules(parts, make, needed=are_placed or parts.group.num_replicas_in_sync > 1)
    if modules.are_seen:
        modules.get()  # it also sees who trains without scope() and run
    return modules
