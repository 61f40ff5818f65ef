"""`ClusterCoordinator`: schedules functions on the workers of a ParameterServerStrategy."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from mpistrat import nest
from mpistrat.context import check_call
from mpistrat.errors import ClosureInputError
from mpistrat.parameter_server.coordinator import per_worker
from mpistrat.parameter_server.coordinator.closures import Closure, ClosureQueue
from mpistrat.parameter_server.coordinator.dispatcher import Cluster, Dispatcher
from mpistrat.parameter_server.coordinator.pickling import loads, raise_explained
from mpistrat.parameter_server.coordinator.remote_value import RemoteValue

if TYPE_CHECKING:
    from mpistrat.strategy import Strategy


class UnbuiltDataset(Iterable[Any]):
    """What a ParameterServerStrategy's `experimental_distribute_dataset` gives, for `create_per_worker_dataset`.

    Args: source: a dataset, or a function that makes one, on a worker.
    """

    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> NoReturn:
        raise ValueError(
            "the workers have the datasets of a ParameterServerStrategy: pass this to "
            "ClusterCoordinator.create_per_worker_dataset"
        )

    cardinality = element_spec = property(__iter__)


class ClusterCoordinator:
    """Has the workers execute functions, while the chief goes on. There is one for a strategy.

    Called by: the chief.
    Args: strategy: a ParameterServerStrategy.
    Raises: ValueError for another strategy.
    """

    def __new__(cls, strategy: Strategy) -> ClusterCoordinator:
        cluster = getattr(getattr(strategy, "extended", None), "cluster", None)
        if not isinstance(cluster, Cluster):
            raise ValueError(
                f"ClusterCoordinator takes a ParameterServerStrategy, on its chief, got {strategy!r:.80}"
            )
        if cluster.coordinator is None:
            cluster.coordinator = super().__new__(cls)
            cluster.coordinator._begin(strategy, cluster)
        coordinator: ClusterCoordinator = cluster.coordinator
        return coordinator

    def _begin(self, strategy: Strategy, cluster: Cluster) -> None:
        self._strategy, self._cluster, self._queue = strategy, cluster, ClosureQueue()
        self._resources = per_worker.ResourceTable(cluster.references, len(cluster.workers))
        self._dispatcher = Dispatcher(cluster, self._queue, self._resources)

    @property
    def strategy(self) -> Strategy:
        return self._strategy

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> RemoteValue:
        """Have any worker call `fn(*args, **kwargs)`; returns at once, unless 262,144 wait, or 1 GiB.

        The function, what it captures and its arguments are pickled now. The strategy, its variables and what was made
        in its scope are not copied: the worker uses its own. Per-worker values and iterators are replaced by the
        worker's part. If a worker dies, another calls `fn` again, and what it does to variables is applied once.

        Raises: an earlier function's error, after all others have ended or been cancelled; TypeError: `fn` cannot be
            called, or something in it or its arguments cannot be pickled (says what); ValueError: a RemoteValue among
            the arguments, a variable made by `fn` (when the result is fetched); UnavailableError: no worker lives.
        """
        args = () if args is None else args
        check_call("schedule", fn, args, kwargs)
        for argument in nest.flatten([args, kwargs]):
            if isinstance(argument, RemoteValue):
                raise ValueError(
                    "a RemoteValue cannot be an argument of a scheduled function: fetch() it, and pass the value"
                )
            if isinstance(argument, per_worker.PerWorkerValues):
                argument.resource(self._resources)  # for its errors
        return self._put(fn, tuple(args), dict(kwargs or {}))

    def join(self) -> None:
        """Wait until all that was scheduled has ended. The chief's torch modules have the servers' values then.

        Raises: the first error of a function, after the others have ended or been cancelled; once.
        """
        self._queue.wait()
        self._cluster.joined()

    def done(self) -> bool:
        """Whether all that was scheduled has ended; if so, as `join`. Raises: as `join`."""
        done = self._queue.done()
        if done:
            self._cluster.joined()
        return done

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, no function is being executed: those that are end before, and others begin after it."""
        try:
            with self._queue.paused():
                yield
        finally:
            self._dispatcher.hand_out()

    def fetch(self, val: Any) -> Any:
        """`val`, a nest, with results in place of its RemoteValues, and NumPy arrays in place of tensors in them.

        Waits for them. Raises: what their functions raised.
        """
        return nest.map_structure(
            lambda leaf: leaf.fetch() if isinstance(leaf, RemoteValue) else leaf, val
        )

    def create_per_worker_dataset(self, dataset_fn: Any) -> per_worker.PerWorkerDataset:
        """A dataset for each worker; `iter` gives what is passed to `schedule`.

        Each worker makes its own when it first needs it, and so it has all elements. Workers' random numbers differ,
        also where the program has seeded them; a generator that the function seeds itself has the same on all, unless
        it looks at `experimental_get_current_worker_index`. One worker makes it now, to see that it can.

        Args: dataset_fn: a function that returns a dataset, or a dataset that can be pickled: a DataLoader, any
            iterable, what `experimental_distribute_dataset` returns.
        Raises: ValueError for anything else, and for a function that makes variables; what making it raises;
            TypeError: it cannot be pickled.
        """
        source = dataset_fn.source if isinstance(dataset_fn, UnbuiltDataset) else dataset_fn
        if not callable(source) and not isinstance(source, Iterable):
            raise ValueError(
                f"create_per_worker_dataset takes a dataset function or a dataset, got {source!r:.60}"
            )
        make = functools.partial(per_worker.DatasetOfWorker, source)
        try:
            resource = self._resources.add(make)
        except Exception as error:
            raise_explained({"the dataset function": source}, self._resources.pack, error)
        dataset = per_worker.PerWorkerDataset(resource, self._resources, self._call)
        try:
            self._call(_nothing, dataset)
        except ClosureInputError as error:
            if error.original is None:
                raise
            raise error.original from error.__cause__
        return dataset

    def __repr__(self) -> str:
        workers = self._resources.workers
        waiting, under_way = len(self._queue), len(self._queue.under_way)
        return f"<{type(self).__name__} {workers=} {waiting=} {under_way=}>"

    def end(self) -> None:
        """Nothing is scheduled any more, and what has not ended has failed. Called by: the strategy, as it ends."""
        self._dispatcher.end()

    def _call(self, fn: Callable[..., Any], argument: Any) -> Any:
        """`fn(argument)`, by the next worker that is free; its error is not one of what was scheduled."""
        return self._put(fn, (argument,), {}, internal=True).get()

    def _put(
        self, fn: Callable[..., Any], args: Any, kwargs: Any, internal: bool = False
    ) -> RemoteValue:
        name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
        try:
            payload, resources = self._resources.pack((fn, args, kwargs))
        except Exception as error:
            values = {f"function {name}": fn}
            values |= {f"argument {i} of {name}": value for i, value in enumerate(args)}
            values |= {f"argument {key!r} of {name}": value for key, value in kwargs.items()}
            raise_explained(values, self._resources.pack, error)
        unpack = functools.partial(loads, resolve=self._cluster.references.resolve)
        result = RemoteValue(self._queue.changed, unpack, name)
        self._queue.put(Closure(name, payload, resources, result, internal))
        self._dispatcher.hand_out()
        return result

    def __reduce__(self) -> Any:
        # An object whose method is scheduled may have it among its attributes.
        return OnTheChief, ()


class OnTheChief:
    """What a scheduled function finds in place of the coordinator."""

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(
            f"ClusterCoordinator.{name} was asked for on a worker; only the chief schedules functions"
        )


def _nothing(dataset: Any) -> None:
    """Making the dataset was all."""
