"""The parts of strategies with parameter servers, put together."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mpistrat.communicators.local import LocalCommunicator
from mpistrat.context import AnyStrategy
from mpistrat.machine.devices import task_of
from mpistrat.parameter_server.client.client import Address
from mpistrat.parameter_server.client.variables_on_servers import VariablesOnServers
from mpistrat.parameter_server.job.checkpoints import CheckpointsOfJob
from mpistrat.parameter_server.protocol.staleness import WorkerClock
from mpistrat.replicas.cross_replica_ops import CrossReplicaOps
from mpistrat.replicas.gradient_rule import GradientRule
from mpistrat.replicas.group import ReplicaGroup
from mpistrat.replicas.input_plan import InputPlan, Share
from mpistrat.replicas.replicas import Replicas
from mpistrat.replicas.strategy_extended import Parts, StrategyExtended
from mpistrat.replicas.torch_modules import ModuleParts, TorchModules
from mpistrat.topology import Topology
from mpistrat.variables.partitioners import Partitioner

if TYPE_CHECKING:
    from mpistrat.parameter_server.client.variables_on_servers import VariablesOnServers
    from mpistrat.parameter_server.coordinator.dispatcher import Cluster
    from mpistrat.parameter_server.coordinator.pickling import References
    from mpistrat.parameter_server.job.job import ServerJob


class ServersExtended(StrategyExtended):
    """The replicas of one rank, with variables on servers.

    Args:
        is_worker: whether this rank is one of the workers that train by themselves.

    Attributes:
        job: the ranks.
        makes_variables: whether this rank's initial values are everybody's: the chief's, or worker 0's where there is
            no chief.
        variables: on the servers.
        torch_references: gives the names by which values of torch are pickled. Called by: `ObjectReferences`, where
            torch is imported.
        cluster: what a chief's coordinator needs; None on other ranks.
    """

    variables: VariablesOnServers
    cluster: Cluster | None = None

    def __init__(
        self,
        strategy: AnyStrategy,
        parts: Parts,
        job: ServerJob,
        is_worker: bool,
        torch_references: Callable[[], References],
    ) -> None:
        super().__init__(strategy, parts)
        self.torch_references = torch_references
        self.makes_variables = self.variables.owns_initial_values
        self.job, self._is_worker = job, is_worker

    def check_destination(self, destinations: Any) -> None:
        """As TensorFlow does; a server's device is as good as this worker's."""
        if not self._is_worker or not isinstance(destinations, str):
            return
        task, roles = task_of(destinations), self.job.roles
        if task is not None and task[0] == roles.task_type and task[1] != roles.task_id:
            raise ValueError(
                f"cannot reduce to another worker: {destinations!r}; this is {self.job.name_of(self.job.rpc.rank)}"
            )


def with_servers(
    strategy: Any,
    job: ServerJob,
    devices: Sequence[str],
    partitioner: Partitioner | None,
    gradients: str | None,
    clock: WorkerClock | None = None,
) -> ServersExtended:
    """The parts of a strategy on this rank. A server serves here, and leaves by SystemExit.

    Args: clock: of a worker that trains by itself; None on a chief, and on a worker that runs its functions.
    """
    if job.roles.task_type == "ps":
        job.serve()
        raise SystemExit(0)
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
    plan = _input_plan(job, group)
    parts = Parts(modules, variables, plan, checkpoints, between_graph=True)
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
