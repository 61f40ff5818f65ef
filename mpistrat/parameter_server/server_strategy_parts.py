"""The parts of strategies with parameter servers, put together."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mpistrat.communicators.local import LocalCommunicator
from mpistrat.parameter_server.checkpoints import CheckpointsOfJob
from mpistrat.parameter_server.client import Address
from mpistrat.parameter_server.servers_extended import ServersExtended
from mpistrat.parameter_server.staleness import WorkerClock
from mpistrat.parameter_server.variables_on_servers import VariablesOnServers
from mpistrat.replicas.cross_replica_ops import CrossReplicaOps
from mpistrat.replicas.gradient_rule import GradientRule
from mpistrat.replicas.group import ReplicaGroup
from mpistrat.replicas.input_plan import InputPlan, Share
from mpistrat.replicas.replicas import Replicas
from mpistrat.replicas.strategy_extended import Parts
from mpistrat.replicas.torch_modules import ModuleParts, TorchModules
from mpistrat.topology import Topology
from mpistrat.variables.partitioners import Partitioner

if TYPE_CHECKING:
    from mpistrat.parameter_server.coordinator.pickling import References
    from mpistrat.parameter_server.job import ServerJob


def with_servers(
    strategy: Any,
    job: ServerJob,
    devices: Sequence[str],
    partitioner: Partitioner | None,
    gradients: str | None,
    clock: WorkerClock | None = None,
) -> ServersExtended:
    """Args: clock: of a worker that trains by itself; None on a chief, and on a worker that runs its functions."""
    roles, coordinated = job.roles, clock is None
    owns = roles.rank == job.trainers[0]
    trains = roles.rank in job.trainers
    # What runs on servers is none of the program.
    topology = job.topology.part(job.trainers) if trains else Topology.single()
    group = ReplicaGroup(LocalCommunicator(), tuple(devices), (len(devices),), topology=topology)
    variables = VariablesOnServers(strategy, job, owns, partitioner, coordinated)

    replicas = Replicas(strategy, group, CrossReplicaOps(group))

    def place(name: str, tensor: Any) -> list[Address]:
        if coordinated and len(devices) > 1:
            raise NotImplementedError(
                "torch modules in the scope of a ParameterServerStrategy whose workers have several devices each: "
                "give each device a worker of its own"
            )
        return variables.place(tensor, name)

    def make_modules(parts: ModuleParts) -> Any:
        from mpistrat.parameter_server.modules.remote_modules import RemoteModules
        from mpistrat.parameter_server.modules.worker_modules import WorkerModules

        if coordinated and not owns:
            return WorkerModules(parts, job.client)
        return RemoteModules(parts, job.client, place, owns, clock)

    module_parts = ModuleParts(replicas, GradientRule(gradients))
    modules = TorchModules(module_parts, make_modules, needed=True)

    @functools.cache
    def torch_references() -> References:
        from mpistrat.parameter_server.modules.chief_references import ChiefReferences

        made = modules.get()
        return ChiefReferences(strategy, made) if owns else made

    def paused() -> contextlib.AbstractContextManager[None]:
        cluster = extended.cluster
        if cluster is None or cluster.coordinator is None:
            return contextlib.nullcontext()
        return cluster.coordinator.paused()

    checkpoints = CheckpointsOfJob(job, owns, paused)
    parts = Parts(modules, variables, _input_plan(job, group), checkpoints)
    extended = ServersExtended(
        strategy, parts, job, is_worker=not coordinated, torch_references=torch_references
    )
    return extended


def _input_plan(job: ServerJob, group: ReplicaGroup) -> InputPlan:
    """Each worker reads its part of each global batch for itself: no other waits for it."""
    trainers, rank = job.trainers, job.roles.rank
    workers, worker = (len(trainers), trainers.index(rank)) if rank in trainers else (1, 0)
    k = group.num_local_replicas
    share = Share(workers, worker, k * workers, range(k))
    return InputPlan(share, (workers, worker), group.worker_devices, partial_steps=False)
