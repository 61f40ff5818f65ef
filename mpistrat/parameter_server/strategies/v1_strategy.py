"""Workers that train each by itself, with variables on servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mpistrat.cluster_resolver import ClusterResolver, MPIClusterResolver
from mpistrat.cluster_resolver.roles.job_roles import check_num_ps, works_alone
from mpistrat.cluster_resolver.roles.task_roles import Cluster
from mpistrat.communicators.local import LocalCommunicator
from mpistrat.machine.devices import check_devices
from mpistrat.options import RunOptions
from mpistrat.parameter_server.job import joining
from mpistrat.parameter_server.protocol.staleness import WorkerClock
from mpistrat.parameter_server.strategies.server_strategy_parts import with_servers
from mpistrat.pytorch.compilation import not_compiled
from mpistrat.replicas.group import ReplicaGroup
from mpistrat.strategies.binding import bind
from mpistrat.strategies.strategy_arguments import StrategyArguments
from mpistrat.strategies.strategy_parts import central_storage
from mpistrat.strategy import Strategy
from mpistrat.variables.partitioners import Partitioner

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpistrat.parameter_server.job.job import ServerJob


class _Servers(NamedTuple):
    """What a worker has of its job; a rank that works alone has none."""

    job: ServerJob
    clock: WorkerClock


class BetweenGraphStrategy(Strategy):
    """Workers that train each by itself, with variables on servers: `mpistrat.compat.v1.ParameterServerStrategy`.

    Every worker runs the same program. A step reads what the servers have then and sends them its updates; nobody waits
    for other workers, unless `max_staleness` says so. Worker 0's initial values are everybody's. A worker with several
    replicas combines what they do first.

    What is said elsewhere of all ranks, or of replicas in sync, holds of this worker's replicas: `reduce`, `gather` and
    a replica's collectives combine these only, and wait for no other worker. Of a DataLoader that shuffles each worker
    has its own sampler: seeded alike, together they read each example once. What a checkpoint has beside variables is
    what the worker has that saves: the first that is alive. A signal that ends the job ends servers at once.

    Called by: every rank of the job (or of `comm`). On a server's rank the constructor serves, and leaves by SystemExit
    when all workers have come to their ends.
    Args:
        cluster_resolver: names each rank's task; its addresses are not used, MPI carries the bytes. None with
            `num_ps`, TF_CONFIG, or a heterogeneous Slurm job, whose first component has the servers. One rank of which
            nothing tells a task keeps the variables itself.
        num_ps: so many ranks are servers, the last of each node in turn.
        variable_partitioner: how variables are split over servers; None splits none.
        max_staleness: how many steps a worker may be ahead of the slowest; 0 is synchronous, None asynchronous. With 0
            a run whose optimizers step returns when the steps of all workers are made, and raises the error that
            prevented them; the gradients of one that raises are dropped.
        replication: as of `mpistrat.ParameterServerStrategy`.
        devices: this worker's devices, one replica each; None is one replica on the rank's own device.
        gradients: as of `MirroredStrategy`, over the replicas of one worker; with `max_staleness=0` over the workers,
            too, where an optimizer's step is refused as long as nothing says which.
        comm: the mpi4py communicator of the ranks that take part; None is all.
        num_gpus_per_worker: in place of `devices`, the first so many GPUs that this rank sees; 0 is one CPU.
        cluster_spec, task_type, task_id: in place of `cluster_resolver`, this rank's task of a cluster: a dict such as
            {"worker": ["a", "b"], "ps": ["c"]}, or a ClusterSpec. Without `cluster_spec`, of that in TF_CONFIG.
    Raises: ValueError, TopologyError: on all ranks, when the tasks do not fit, such as `cluster_spec` without
        `task_type` or `task_id`.
    """

    why_no_replica_block = (
        "servers have the variables, and run gets their values: call strategy.run(step)"
    )

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        *,
        num_ps: int | None = None,
        replication: int = 1,
        variable_partitioner: Partitioner | None = None,
        max_staleness: int | None = None,
        devices: Sequence[str] | None = None,
        gradients: str | None = None,
        comm: MPI.Intracomm | None = None,
        num_gpus_per_worker: int | None = None,
        cluster_spec: Cluster = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        cluster_resolver = joining.resolver_of_task(
            cluster_resolver, cluster_spec, task_type, task_id
        )
        devices = joining.devices_of_worker(devices, num_gpus_per_worker)
        arguments = StrategyArguments(gradients=gradients)
        joining.check_arguments(variable_partitioner, replication)
        if max_staleness is not None and (type(max_staleness) is not int or max_staleness < 0):
            raise ValueError(
                "max_staleness must be a number of steps, 0 (synchronous) or more, or None (asynchronous), got "
                f"{max_staleness!r:.60}"
            )
        if num_ps is not None:
            check_num_ps(num_ps)
        topology = MPIClusterResolver(comm).topology()
        self._servers: _Servers | None = None
        if works_alone(topology, cluster_resolver):
            bound = bind(LocalCommunicator(), topology, check_devices(devices))
            group = ReplicaGroup(LocalCommunicator(), bound, (len(bound),))
            parameter_device = bound[0] if len(bound) == 1 else "cpu:0"
            alone = central_storage(self, group, parameter_device, arguments)
            super().__init__(alone, cluster_resolver)
            return
        job, devices = joining.join_job(
            cluster_resolver,
            num_ps,
            comm,
            devices,
            chief=False,
            description=f"{type(self).__name__} of compat.v1, max_staleness={max_staleness}, gradients={gradients!r}, "
            f"replication={replication}",
            replication=replication,
        )
        clock = WorkerClock(job.client.routes, max_staleness)
        self._servers = _Servers(job, clock)
        extended = with_servers(self, job, devices, variable_partitioner, gradients, clock)
        super().__init__(extended, cluster_resolver or joining.resolver_of(job.roles))
        if clock.combines:
            self.workers_combined = len(job.trainers)

    @not_compiled
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """One step of this worker: call `fn` on each of its replicas, with what the servers have now.

        Called by: each worker, as often as it likes; with `max_staleness` it waits for those that are behind.
        Args: as of `Strategy.run`.
        Returns: what `fn` returned; with several replicas a structure of `PerReplica` values.
        Raises: what `fn` raised: then it counts as no step, and what was sent to be combined is dropped. StallError:
            others are too far behind for too long. With `max_staleness=0`, why a step by all workers' gradients could
            not be made.
        """
        if self._servers is None:
            return super().run(fn, args, kwargs, options)
        clock = self._servers.clock
        clock.begin()
        try:
            result = super().run(fn, args, kwargs, options)
            self._modules.after_run()
        except BaseException:
            clock.fail()
            raise
        clock.end()
        return result

    def shutdown(self) -> None:
        """Use the servers no more, as at the program's end: this worker holds nobody back; they leave with the last."""
        if self._servers is not None:
            self._servers.job.done()

    @property
    def steps(self) -> dict[str, int]:
        """How many times each worker has called `run`, such as {"worker 0 (rank 0)": 17}: who lags, and how far."""
        if self._servers is None:
            return {"worker 0 (rank 0)": self.runs}
        return self._servers.clock.all_steps()

    @property
    def bytes_moved(self) -> dict[str, int]:
        """How many bytes of variables this worker has {"pulled": from servers, "pushed": to them} so far."""
        if self._servers is None:
            return {"pulled": 0, "pushed": 0}
        client = self._servers.job.client
        return {"pulled": client.bytes_pulled, "pushed": client.bytes_pushed}
