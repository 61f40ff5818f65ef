"""A chief that has workers run functions, with variables on servers."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mpistrat.cluster_resolver import ClusterResolver
from mpistrat.context import AnyStrategy
from mpistrat.input.input_context import InputContext
from mpistrat.liveness.ending import interrupts
from mpistrat.machine.notices import warn_of_no_effect
from mpistrat.options import InputOptions, RunOptions
from mpistrat.parameter_server.client.variables_on_servers import (
    RemoteVariable,
    parts_of,
    variable_of,
)
from mpistrat.parameter_server.coordinator.cluster_coordinator import UnbuiltDataset
from mpistrat.parameter_server.coordinator.dispatcher import Cluster
from mpistrat.parameter_server.coordinator.pickling import References
from mpistrat.parameter_server.coordinator.worker import Worker, seed_for_worker
from mpistrat.parameter_server.job import joining
from mpistrat.parameter_server.strategies.server_strategy_parts import ServersExtended, with_servers
from mpistrat.pytorch.compilation import not_compiled
from mpistrat.reduce_op import ReduceOp
from mpistrat.strategies.strategy_arguments import StrategyArguments
from mpistrat.strategy import Strategy, checked_input_options
from mpistrat.variables.partitioners import Partitioner

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpistrat.parameter_server.job.job import ServerJob


_STRATEGY, _VARIABLE, _OF_TORCH = "strategy", "variable", "of torch"


class ObjectReferences:
    """The strategy, its variables, and what torch modules have on servers.

    A key has all that is needed to make the other side's form.
    """

    def __init__(self, strategy: AnyStrategy, job: ServerJob) -> None:
        self._strategy, self._job = strategy, job
        self._made: dict[Any, Any] = {}

    def reference_of(self, value: Any) -> Any | None:
        """The key of `value`; None for what is copied."""
        if value is self._strategy:
            return (_STRATEGY,)
        of_torch = self._of_torch
        if of_torch is not None and (key := of_torch.reference_of(value)) is not None:
            return _OF_TORCH, key
        parts = parts_of(value)
        if not isinstance(parts[0], RemoteVariable) or value.strategy is not self._strategy:
            return None
        how = value.trainable, value.synchronization, value.aggregation
        return _VARIABLE, value.name, tuple(part.address for part in parts), how

    def reduction_of(self, value: Any) -> tuple[Any, ...] | None:
        of_torch = self._of_torch
        return None if of_torch is None else of_torch.reduction_of(value)

    @property
    def _of_torch(self) -> References | None:
        return self._strategy.extended.torch_references() if "torch" in sys.modules else None

    def resolve(self, key: Any) -> Any:
        if key[0] == _STRATEGY:
            return self._strategy
        if key[0] == _OF_TORCH:
            return self._strategy.extended.torch_references().resolve(key[1])
        if key not in self._made:
            _, name, addresses, how = key
            self._made[key] = variable_of(self._strategy, self._job, name, addresses, how)
        return self._made[key]


class ParameterServerStrategy(Strategy):
    """A chief that has workers run functions, with variables on servers; see `ClusterCoordinator`.

    The chief makes variables, and schedules functions; workers run them, each when it is free, and read and change the
    variables there. On the ranks of workers and servers the constructor works for the chief, and leaves by SystemExit
    when the chief has come to its end: what follows it in the program is the chief's alone. What is said elsewhere of
    all ranks holds of the one that calls: `run`, `reduce`, `gather` and a replica's collectives, on the chief or in a
    function, are of its own replicas.

    Called by: every rank of the job (or of `comm`).
    Args:
        cluster_resolver: names each rank's task, one of them "chief"; its addresses are not used, MPI carries the
            bytes. None with `num_ps`, TF_CONFIG, or a heterogeneous Slurm job, whose first component has the chief and
            the servers.
        variable_partitioner: how variables are split over servers; None splits none.
        num_ps: so many ranks are servers, the last of each node in turn; rank 0 is the chief.
        replication: 2 keeps a second copy of each server's variables, and of their optimizers' state, on the next
            server, which goes on with them when the first has died; fault tolerant MPI is needed for that. A change
            is acknowledged when both servers have it.
        devices: of each worker, one replica each; None is one replica on the rank's own device. With several, torch
            modules in the scope raise NotImplementedError.
        gradients: as of `MirroredStrategy`, over the replicas of one worker.
        comm: the mpi4py communicator of the ranks that take part; None is all.
    Raises: ValueError, TopologyError: on all ranks, when the tasks do not fit.
    """

    _extended: ServersExtended

    why_no_replica_block = (
        "the chief has workers call functions: give them to ClusterCoordinator.schedule"
    )

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Partitioner | None = None,
        *,
        num_ps: int | None = None,
        replication: int = 1,
        devices: Sequence[str] | None = None,
        gradients: str | None = None,
        comm: MPI.Intracomm | None = None,
    ) -> None:
        StrategyArguments(gradients=gradients)  # raises for a wrong one
        joining.check_arguments(variable_partitioner, replication)
        job, devices = joining.join_job(
            cluster_resolver,
            num_ps,
            comm,
            devices,
            chief=True,
            description=f"{type(self).__name__}, replication={replication}",
            replication=replication,
        )
        extended = with_servers(self, job, devices, variable_partitioner, gradients)
        super().__init__(extended, cluster_resolver or joining.resolver_of(job.roles))
        if job.roles.task_type == "worker":
            self.work()
            raise SystemExit(0)
        if job.roles.task_type != "chief":
            return  # an evaluator, which reads the variables
        self._extended.cluster = Cluster(
            job.rpc,
            job.workers,
            ObjectReferences(self, job),
            job.client.routes.forget,
            self._refresh,
            is_needed=job.client.routes.is_lost_with,
        )

    @classmethod
    def of_worker(cls, job: ServerJob, devices: Sequence[str]) -> ParameterServerStrategy:
        """What the functions on a worker have, whose rank has joined the job already."""
        strategy = cls.__new__(cls)
        Strategy.__init__(strategy, with_servers(strategy, job, devices, None, None))
        return strategy

    def work(self) -> None:
        """Run the chief's functions until it has come to its end. Called by: a worker."""
        job = self._extended.job
        seed_for_worker(job.roles.task_id)
        chief, references = job.roles.ranks["chief"][0], ObjectReferences(self, job)
        worker = Worker(job.rpc, chief, job.roles.task_id, references, self._in_closure)
        with interrupts.ignore_interrupts():
            worker.serve(lambda: job.ended)
        job.done()

    @contextlib.contextmanager
    def _in_closure(self, closure: int) -> Iterator[Callable[[], None]]:
        with self.scope(), self._extended.job.client.numbers.within(closure):
            if self._modules.made is not None:
                self._modules.made.clear()
            yield self._begin_closure
            self._modules.after_run()

    def _begin_closure(self) -> None:
        if self._modules.made is not None:
            self._modules.made.begin()

    def _refresh(self) -> None:
        """What the chief's modules have is what the servers have."""
        if self._modules.made is not None:
            self._modules.made.before_run()

    @not_compiled
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        self._warn_on_chief("run")
        result = super().run(fn, args, kwargs, options)
        self._modules.after_run()
        return result

    def reduce(
        self, reduce_op: ReduceOp | str, value: Any, axis: int | Sequence[int] | None
    ) -> Any:
        self._warn_on_chief("reduce")
        return super().reduce(reduce_op, value, axis)

    def _warn_on_chief(self, method: str) -> None:
        if self._extended.cluster is not None:
            warnings.warn(
                f"{method} works on the chief here, and on no worker: call it in a function that "
                "ClusterCoordinator.schedule is given",
                RuntimeWarning,
                stacklevel=3,
            )

    def experimental_distribute_dataset(  # type: ignore[override]
        self, dataset: Any, options: InputOptions | None = None
    ) -> UnbuiltDataset:
        """For `ClusterCoordinator.create_per_worker_dataset`: each worker makes its own. `options` do nothing."""
        self._check_input_options(options)
        return UnbuiltDataset(dataset)

    def distribute_datasets_from_function(  # type: ignore[override]
        self, dataset_fn: Any, options: InputOptions | None = None
    ) -> UnbuiltDataset:
        """For `ClusterCoordinator.create_per_worker_dataset`: each worker calls `dataset_fn(InputContext())`."""
        self._check_input_options(options)
        return UnbuiltDataset(functools.partial(dataset_fn, InputContext()))

    def _check_input_options(self, options: InputOptions | None) -> None:
        checked_input_options(options, self._extended, False)
        if options is not None:
            warn_of_no_effect(
                f"InputOptions of a {type(self).__name__}",
                "each worker iterates over a dataset of its own, whose batches are as it makes them",
            )

    def shutdown(self) -> None:
        """Let workers and servers leave. Called by: the chief, which can use neither after it."""
        cluster = self._extended.cluster
        if cluster is not None and cluster.coordinator is not None:
            cluster.coordinator.end()
        self._extended.job.done()
