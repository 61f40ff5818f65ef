"""The parts of strategies with parameter servers, and the roles of their ranks in checkpoints."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mpistrat.communicators.local import LocalCommunicator
from mpistrat.context import AnyStrategy
from mpistrat.errors import counted
from mpistrat.machine.devices import task_of
from mpistrat.machine.notices import tell
from mpistrat.parameter_server.client.variables_on_servers import VariablesOnServers
from mpistrat.parameter_server.protocol.messages import Address
from mpistrat.parameter_server.protocol.snapshot import consistent_snapshot
from mpistrat.parameter_server.protocol.staleness import WorkerClock
from mpistrat.parameter_server.rpc.endpoint import attributed_error
from mpistrat.replicas.checkpoint_role import CheckpointRole
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
    from mpistrat.parameter_server.coordinator.dispatcher import Cluster
    from mpistrat.parameter_server.coordinator.pickling import References
    from mpistrat.parameter_server.job.job import ServerJob


class CheckpointsOfJob(CheckpointRole):
    """A rank's role in checkpoints of a job with servers: one rank saves, and one restores for all ranks.

    The other ranks that use the servers wait in `follow` for the result, which comes through the first server.

    Args:
        owns: whether this rank makes the variables; it then also restores checkpoints.
        paused: returns a context in which no worker executes a function.
    """

    all_take_part = False

    def __init__(
        self,
        job: ServerJob,
        owns: bool,
        paused: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._job = job
        self._owns = owns
        self._paused = paused
        self._published = itertools.count()  # atomic: saves may run in threads

    @property
    def saves(self) -> bool:
        """Whether this rank saves checkpoints now.

        In a cluster with a chief, the rank that makes the variables saves; otherwise the first living worker does.
        """
        if self._owns or "chief" in self._job.roles.ranks:
            return self._owns
        rpc = self._job.rpc
        for worker in self._job.workers:
            if not rpc.channel.has_died(worker):
                return rpc.rank == worker
        return False

    @property
    def restores(self) -> bool:
        return self._owns

    @property
    def has_followers(self) -> bool:
        return self._owns and len(self._job.clients) > 1

    @contextlib.contextmanager
    def unchanging(self) -> Iterator[None]:
        with self._paused(), consistent_snapshot(self._job.client.routes):
            yield

    def already_written(self) -> contextlib.AbstractContextManager[None]:
        return self._job.client.already_written()

    def completed(self, path: str, restored: bool = False) -> None:
        self._job.tell_of_checkpoint(path)
        if restored:
            servers = counted(len(self._job.servers), "parameter server")
            tell(f"the job goes on from {path}, with {servers}", "INFO")

    def tell_followers(self, what: str, value: Any, error: Exception | None = None) -> None:
        name = what, next(self._published)
        self._job.client.publish(name, (value, error))

    @contextlib.contextmanager
    def telling_failure(self, what: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            failed = f"{self._job.rpc.own_name} has not {what}"
            self.tell_followers(what, None, attributed_error(error, failed))
            raise

    def follow(self, what: str) -> Any:
        name = what, next(self._published)
        value, error = self._job.client.await_published(name)
        if error is not None:
            raise error
        return value


class ServersExtended(StrategyExtended):
    """The `extended` of a strategy with variables on servers, on one rank.

    Args:
        is_worker: whether this rank is a worker that trains by itself, without a coordinator.

    Attributes:
        makes_variables: whether this rank's initial values become the variables' values: True on the chief, or on
            worker 0 in a job without a chief.
        torch_references: returns the `References` that pickle torch objects. Only `ObjectReferences` calls it, after
            the program has imported torch.
        cluster: connects the chief's coordinator to the workers; None on other ranks.
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
        self.job = job
        self._is_worker = is_worker

    def check_destination(self, destinations: Any) -> None:
        """Check a destination of `reduce`, as TensorFlow does. A device of a server or of this worker is accepted.

        Raises: ValueError if a worker without a coordinator names a device of another worker.
        """
        if not self._is_worker or not isinstance(destinations, str):
            return
        task = task_of(destinations)
        if task is None:
            return
        task_type, task_id = task
        roles = self.job.roles
        if task_type == roles.task_type and task_id != roles.task_id:
            raise ValueError(
                f"cannot reduce to another worker: {destinations!r}; this is {self.job.rpc.own_name}"
            )


def with_servers(
    strategy: Any,
    job: ServerJob,
    devices: Sequence[str],
    partitioner: Partitioner | None,
    gradients: str | None,
    clock: WorkerClock | None = None,
) -> ServersExtended:
    """Make the `extended` of a strategy on this rank. On a server, serve instead, and raise SystemExit(0) at the end.

    Called by: the strategies' constructors, after `join_job`, and `ParameterServerStrategy.of_worker`.
    Args:
        gradients: "sum", "mean", or None: how a worker combines the gradients of its replicas.
        clock: the clock of a worker that trains by itself; None on a chief, and on a worker of a chief.
    """
    if job.roles.task_type == "ps":
        job.serve()
        raise SystemExit(0)
    roles = job.roles
    coordinated = clock is None
    trainers = job.trainers
    owns = roles.rank == trainers[0]
    trains = roles.rank in trainers
    # The program's topology has only the ranks that train, because servers run no part of the program.
    topology = Topology.single()
    if trains:
        topology = job.topology.part(trainers)
    replicas_here = len(devices)
    group = ReplicaGroup(LocalCommunicator(), tuple(devices), (replicas_here,), topology=topology)
    variables = VariablesOnServers(strategy, job, owns, partitioner, coordinated)

    replicas = Replicas(strategy, group, CrossReplicaOps(group))

    def place(name: str, tensor: Any) -> list[Address]:
        if coordinated and replicas_here > 1:
            raise NotImplementedError(
                "torch modules in the scope of a ParameterServerStrategy whose workers have several devices each: "
                "give each device a worker of its own"
            )
        return variables.place(tensor, name)

    def make_modules(parts: ModuleParts) -> Any:
        from mpistrat.parameter_server.modules import remote_modules, scheduled_modules

        if coordinated and not owns:
            return scheduled_modules.WorkerModules(parts, job.client)
        return remote_modules.RemoteModules(parts, job.client, place, owns, clock)

    module_parts = ModuleParts(replicas, GradientRule(gradients))
    modules = TorchModules(module_parts, make_modules, needed=True)

    @functools.cache
    def torch_references() -> References:
        from mpistrat.parameter_server.modules.scheduled_modules import ChiefReferences

        made = modules.get()
        return ChiefReferences(strategy, made) if owns else made

    def paused() -> contextlib.AbstractContextManager[None]:
        coordinator: Any = getattr(extended.cluster, "coordinator", None)
        if coordinator is None:
            return contextlib.nullcontext()
        return coordinator.paused()

    checkpoints = CheckpointsOfJob(job, owns, paused)
    # Each worker reads its own part of each global batch, and no other worker waits for it.
    num_pipelines = 1
    pipeline = 0
    if trains:
        num_pipelines = len(trainers)
        pipeline = trainers.index(roles.rank)
    total = replicas_here * num_pipelines
    share = Share(num_pipelines, pipeline, total, range(replicas_here))
    pipelines = num_pipelines, pipeline
    plan = InputPlan(share, pipelines, group.worker_devices, partial_steps=False)
    parts = Parts(modules, variables, plan, checkpoints, between_graph=True)
    extended = ServersExtended(
        strategy, parts, job, is_worker=not coordinated, torch_references=torch_references
    )
    return extended
