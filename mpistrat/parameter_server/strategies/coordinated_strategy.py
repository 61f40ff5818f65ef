"""`ParameterServerStrategy`: a chief has workers run functions, and the variables are on servers."""

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
from mpistrat.parameter_server.coordinator.dispatcher import Cluster
from mpistrat.parameter_server.coordinator.per_worker import UnbuiltDataset
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


_STRATEGY = "strategy"
_VARIABLE = "variable"
_OF_TORCH = "of torch"


class ObjectReferences:
    """Keys for a strategy, its variables, and its torch tensors on servers, in pickles (`pickling.References`).

    A key contains all that the other rank needs to find or make its own object.
    """

    def __init__(self, strategy: AnyStrategy, job: ServerJob) -> None:
        self._strategy = strategy
        self._job = job
        self._made: dict[Any, Any] = {}

    def reference_of(self, value: Any) -> Any | None:
        """Return the key of the strategy, a variable or a torch tensor on servers; None for a value to be copied."""
        if value is self._strategy:
            return (_STRATEGY,)
        of_torch = self._of_torch
        if of_torch is not None:
            key = of_torch.reference_of(value)
            if key is not None:
                return _OF_TORCH, key
        parts = parts_of(value)
        is_remote = isinstance(parts[0], RemoteVariable)
        if not is_remote or value.strategy is not self._strategy:
            return None
        how = value.trainable, value.synchronization, value.aggregation
        addresses = tuple(part.address for part in parts)
        return _VARIABLE, value.name, addresses, how

    def reduction_of(self, value: Any) -> tuple[Any, ...] | None:
        of_torch = self._of_torch
        if of_torch is None:
            return None
        return of_torch.reduction_of(value)

    @property
    def _of_torch(self) -> References | None:
        if "torch" not in sys.modules:
            return None
        return self._strategy.extended.torch_references()

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
    """A chief has workers run functions, and the variables are on servers; see `ClusterCoordinator`.

    The chief makes variables and schedules functions. A worker that is free runs the next function, and reads and
    changes the variables on the servers. On workers and servers the constructor works for the chief, and raises
    SystemExit when the chief ends. So only the chief runs the rest of the program. `run`, `reduce`, `gather` and a
    replica's collectives, on the chief or in a function, combine only the replicas of the rank that calls them.

    Called by: every rank of the job (or of `comm`).
    Args:
        cluster_resolver: names each rank's task; one task is "chief". Addresses are not used, as MPI carries the bytes.
            None if `num_ps`, TF_CONFIG, or a heterogeneous Slurm job gives the tasks. In such a Slurm job the first
            component has the chief and the servers.
        variable_partitioner: splits variables over servers; None splits none.
        num_ps: the number of ranks that are servers: the last rank of each node, in turn. Rank 0 is the chief.
        replication: 2 keeps a second copy of each server's variables and optimizer state on the next server. That
            server continues with the copy when the first has died, and acknowledges a change when both have it. Needs
            fault tolerant MPI. 1 keeps no second copy.
        devices: the devices of each worker, one replica on each; None is one replica on the rank's own device. With
            several devices, torch modules in the scope raise NotImplementedError.
        gradients: "sum" or "mean": how a worker combines the gradients of its replicas; with None, the first loss that
            the program scales decides, as in `MirroredStrategy`.
        comm: the mpi4py communicator of the ranks that take part; None is all ranks.
    Raises: ValueError, TopologyError: on all ranks, if the tasks of the ranks contradict each other.

    Example, on several ranks::

        strategy = ms.ParameterServerStrategy(num_ps=1)  # only the chief returns from here
        coordinator = ms.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            total = ms.Variable(0.0)
        coordinator.schedule(total.assign_add, args=(1.0,))
        coordinator.join()  # total.numpy() is 1.0

    Example, on several ranks::

        def step(iterator):  # a worker executes it
            losses = strategy.run(lambda batch: batch.mean(), args=(next(iterator),))
            return strategy.reduce("mean", losses, axis=None)
        loss = coordinator.schedule(step, args=(iterator,))
        strategy.shutdown()  # workers and servers leave
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
            return  # an evaluator: it only reads the variables
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
        """Make the strategy of a worker whose rank has already joined the job.

        Called by: `Server.join`, on a worker.
        Args: devices: the worker's devices, one replica on each.

        Example, on several ranks::

            strategy = ms.ParameterServerStrategy.of_worker(job, devices)
            strategy.work()  # returns when the chief ends
        """
        strategy = cls.__new__(cls)
        Strategy.__init__(strategy, with_servers(strategy, job, devices, None, None))
        return strategy

    def work(self) -> None:
        """Run the chief's functions, and return when the chief ends.

        Called by: the constructor, on a worker, and `Server.join`.
        """
        job = self._extended.job
        seed_for_worker(job.roles.task_id)
        chief = job.roles.ranks["chief"][0]
        references = ObjectReferences(self, job)
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
        """Pull the servers' values into the chief's torch modules, if there are any.

        Called by: the coordinator's `join` and `done`, when all functions have ended.
        """
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
                f"{method} works on the chief here, and on no worker: call it in a function that you pass to "
                "ClusterCoordinator.schedule",
                RuntimeWarning,
                stacklevel=3,
            )

    def experimental_distribute_dataset(  # type: ignore[override]
        self, dataset: Any, options: InputOptions | None = None
    ) -> UnbuiltDataset:
        """Wrap a dataset for `ClusterCoordinator.create_per_worker_dataset`; each worker makes its own copy.

        Args: options: have no effect, and a warning says so.

        Example, on several ranks::

            distributed = strategy.experimental_distribute_dataset([1.0, 2.0, 3.0])
            iterator = iter(coordinator.create_per_worker_dataset(distributed))
        """
        self._check_input_options(options)
        return UnbuiltDataset(dataset)

    def distribute_datasets_from_function(  # type: ignore[override]
        self, dataset_fn: Any, options: InputOptions | None = None
    ) -> UnbuiltDataset:
        """Wrap a function for `ClusterCoordinator.create_per_worker_dataset`.

        Each worker calls `dataset_fn(InputContext())` and uses the dataset that it returns.

        Args: options: have no effect, and a warning says so.

        Example, on several ranks::

            distributed = strategy.distribute_datasets_from_function(lambda context: range(100))
            iterator = iter(coordinator.create_per_worker_dataset(distributed))
        """
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
        """Tell the workers and servers to end. On their ranks the constructor then raises SystemExit.

        Functions that have not ended fail with UnavailableError, and an error message on stderr counts them.

        Called by: the chief. It can use neither workers nor servers afterwards.
        """
        coordinator = getattr(self._extended.cluster, "coordinator", None)
        if coordinator is not None:
            coordinator.end()
        self._extended.job.done()
