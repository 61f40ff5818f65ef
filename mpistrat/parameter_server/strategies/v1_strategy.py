"""`compat.v1.ParameterServerStrategy`: each worker trains by itself, and the variables are on servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mpistrat.cluster_resolver import ClusterResolver, MPIClusterResolver
from mpistrat.cluster_resolver.roles.job_roles import check_num_ps, works_alone
from mpistrat.cluster_resolver.task_roles import Cluster
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
    """The job and the clock of a worker; a rank that works alone has neither."""

    job: ServerJob
    clock: WorkerClock


class BetweenGraphStrategy(Strategy):
    """Each worker trains by itself, and the variables are on servers: `mpistrat.compat.v1.ParameterServerStrategy`.

    Every worker runs the same program. A step reads the servers' values and sends its updates to the servers. No worker
    waits for other workers, unless `max_staleness` says so. The variables begin with worker 0's initial values. A
    worker with several replicas first combines the updates of its replicas.

    `reduce`, `gather` and a replica's collectives combine this worker's replicas only, and wait for no other worker.
    Each worker has its own sampler for a DataLoader that shuffles: with equal seeds, the workers together read each
    example once. The first living worker saves checkpoints; everything in a checkpoint beside the variables comes from
    that worker. A signal that ends the job ends servers at once.

    On a server the constructor serves, and raises SystemExit when all workers have ended.

    Called by: every rank of the job (or of `comm`).
    Args:
        cluster_resolver: names each rank's task. Addresses are not used, as MPI carries the bytes. None if `num_ps`,
            TF_CONFIG, or a heterogeneous Slurm job gives the tasks. In such a Slurm job the first component has the
            servers. A single rank without any of these keeps the variables itself.
        num_ps: the number of ranks that are servers: the last rank of each node, in turn.
        variable_partitioner: splits variables over servers; None splits none.
        max_staleness: the number of steps that a worker may be ahead of the slowest worker; 0 is synchronous, None is
            asynchronous. With 0, if optimizers step in a run, the run returns when the servers have applied the
            combined step of all workers, or raises their error. If `fn` raises, the run's gradients are dropped.
        replication: 2 keeps a second copy of each server's variables and optimizer state on the next server, as in
            `mpistrat.ParameterServerStrategy`. 1 keeps no second copy.
        devices: this worker's devices, one replica on each; None is one replica on the rank's own device.
        gradients: "sum" or "mean": how a worker combines the gradients of its replicas; with None, the first loss that
            the program scales decides, as in `MirroredStrategy`. With `max_staleness=0` the servers combine the
            workers' gradients by the same rule, and an optimizer's step raises RuntimeError while nothing has decided.
        comm: the mpi4py communicator of the ranks that take part; None is all ranks.
        num_gpus_per_worker: the number of GPUs to use in place of `devices`: the first GPUs that this rank sees; 0 uses
            the CPU.
        cluster_spec, task_type, task_id: this rank's task, in place of `cluster_resolver`. The cluster is a dict such
            as {"worker": ["a", "b"], "ps": ["c"]}, or a ClusterSpec; None takes the cluster in TF_CONFIG.
    Raises: ValueError, TopologyError: on all ranks, if the tasks of the ranks contradict each other, such as
        `cluster_spec` without `task_type` or `task_id`.

    Example:
        >>> strategy = ms.compat.v1.ParameterServerStrategy()  # one rank keeps the variables itself
        >>> with strategy.scope():
        ...     count = ms.Variable(0)
        >>> int(strategy.run(lambda: count.assign_add(1)))
        1

    Example, on several ranks::

        strategy = ms.compat.v1.ParameterServerStrategy(num_ps=1, max_staleness=0)
        for batch in batches:
            loss = strategy.run(train_step, args=(batch,))
        print(strategy.steps)        # {"worker 0 (rank 0)": 100, "worker 1 (rank 1)": 100}
        print(strategy.bytes_moved)  # {"pulled": 81920, "pushed": 81920}
        strategy.shutdown()
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
        """Make one step of this worker: pull the servers' values, and call `fn` on each of the worker's replicas.

        With `max_staleness`, the worker first waits until no other worker is more than that many steps behind it.

        Called by: each worker, as often as it likes.
        Args:
            fn: the function to call on each replica.
            args, kwargs: the arguments of `fn`; each replica gets its own component of a `PerReplica` value.
        Returns: the result of `fn`; with several replicas, a structure of `PerReplica` values.
        Raises: the error of `fn`; the run then counts as no step, and gradients to be combined are dropped. StallError
            when a worker stays too far behind for MPISTRAT_STALL_SECONDS. With `max_staleness=0`, the error of a server
            that could not apply the combined step of all workers.
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
        """Tell the servers that this worker has ended, as at the program's end. It cannot use variables afterwards.

        Other workers no longer wait for this worker's steps. The servers end when all workers have ended.
        """
        if self._servers is not None:
            self._servers.job.done()

    @property
    def steps(self) -> dict[str, int]:
        """The number of steps that each worker has ended, such as {"worker 0 (rank 0)": 17}; asks the first server."""
        if self._servers is None:
            return {"worker 0 (rank 0)": self.runs}
        return self._servers.clock.all_steps()

    @property
    def bytes_moved(self) -> dict[str, int]:
        """Bytes of variables that this worker has read from servers ("pulled") and sent to servers ("pushed")."""
        if self._servers is None:
            return {"pulled": 0, "pushed": 0}
        client = self._servers.job.client
        return {"pulled": client.bytes_pulled, "pushed": client.bytes_pushed}
