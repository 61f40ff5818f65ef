"""`ClusterCoordinator`: schedules functions on the workers of a ParameterServerStrategy."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from mpistrat import nest
from mpistrat.context import check_call
from mpistrat.errors import ClosureInputError
from mpistrat.parameter_server.coordinator import per_worker
from mpistrat.parameter_server.coordinator.closures import Closure, ClosureQueue
from mpistrat.parameter_server.coordinator.dispatcher import Cluster, Dispatcher
from mpistrat.parameter_server.coordinator.pickling import loads, raise_explained
from mpistrat.parameter_server.coordinator.remote_value import RemoteValue
from mpistrat.strategy import Strategy


class ClusterCoordinator:
    """Schedules functions on the workers, while the chief continues. A worker that is free executes the next function.

    Each strategy has one coordinator, so a second call with the same strategy returns the same object.

    Called by: the chief.
    Args: strategy: a ParameterServerStrategy.
    Raises: ValueError for another strategy.

    Example, on several ranks::

        coordinator = ms.coordinator.ClusterCoordinator(strategy)
        iterator = iter(coordinator.create_per_worker_dataset(make_loader))
        losses = [coordinator.schedule(step, args=(iterator,)) for _ in range(100)]
        coordinator.done()  # False while workers execute steps
        coordinator.join()
        coordinator.fetch(losses[-1])  # the last loss as a NumPy array
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
        self._strategy = strategy
        self._cluster = cluster
        self._queue = ClosureQueue()
        self._resources = per_worker.ResourceTable(cluster.references, len(cluster.workers))
        self._dispatcher = Dispatcher(cluster, self._queue, self._resources)

    @property
    def strategy(self) -> Strategy:
        """The ParameterServerStrategy whose workers execute the functions.

        Example, on several ranks::

            coordinator = ms.coordinator.ClusterCoordinator(strategy)
            assert coordinator.strategy is strategy
        """
        return self._strategy

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> RemoteValue:
        """Have any worker call `fn(*args, **kwargs)`, and return its future result.

        `schedule` pickles the function, the objects that it captures, and its arguments. It does not copy the strategy,
        its variables, and the modules made in its scope: the worker uses its own. The worker gets its own part of
        per-worker values and iterators. If a worker dies, another worker calls `fn` again, and the servers make each
        update of `fn` once.

        `schedule` waits only while 262,144 functions wait, or the unfinished functions take 1 GiB.

        Returns: the future result of `fn`. Its `get` raises the error of `fn`; ValueError if `fn` makes a variable.
        Raises: the error of an earlier function, after all others have ended or been cancelled; TypeError if `fn` is
            not callable, or it or an argument cannot be pickled (the text names the part); ValueError for a RemoteValue
            among the arguments; UnavailableError if no worker lives, or the strategy was shut down.
        """
        if args is None:
            args = ()
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
        """Wait until all scheduled functions have ended. Then the chief's torch modules have the servers' values.

        Raises: the first error of a function, once, after the other functions have ended or been cancelled.
        """
        self._queue.wait()
        self._cluster.joined()

    def done(self) -> bool:
        """Whether all scheduled functions have ended. Does not wait for them, unless one has raised an error.

        If it returns True, the chief's torch modules have the servers' values.

        Raises: the first error of a function, once, after the other functions have ended or been cancelled.
        """
        done = self._queue.done()
        if done:
            self._cluster.joined()
        return done

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Wait until the running functions have ended; inside, no worker begins another function.

        Called by: checkpoints, so that they have each function's updates all or not at all.

        Example, on several ranks::

            with coordinator.paused():
                print(total.numpy())  # no worker changes it meanwhile
        """
        try:
            with self._queue.paused():
                yield
        finally:
            self._dispatcher.hand_out()

    def fetch(self, val: Any) -> Any:
        """Wait for the RemoteValues in a nest (dicts, lists, tuples), and return the nest with their results in place.

        Tensors and variables in a result become NumPy arrays; other leaves stay as they are.

        Raises: the error of a function.
        """
        return nest.map_structure(
            lambda leaf: leaf.fetch() if isinstance(leaf, RemoteValue) else leaf, val
        )

    def create_per_worker_dataset(self, dataset_fn: Any) -> per_worker.PerWorkerDataset:
        """Return a dataset with a copy on each worker. Pass `iter` of it to `schedule`; the chief cannot read elements.

        Each worker makes its own dataset when it first needs it, with all elements. Workers draw different random
        numbers, also if the program has seeded them. If the function seeds a generator itself, all workers draw the
        same numbers, unless the seed depends on `experimental_get_current_worker_index`. One worker makes the dataset
        now, so that errors appear here.

        Args:
            dataset_fn: a function that returns a dataset, or a dataset that can be pickled. A dataset is a DataLoader,
                any iterable, or the result of the strategy's `experimental_distribute_dataset` or
                `distribute_datasets_from_function`.
        Raises: ValueError for another argument, or if the function makes variables; the function's error; TypeError if
            the argument cannot be pickled.
        """
        source = dataset_fn
        if isinstance(dataset_fn, per_worker.UnbuiltDataset):
            source = dataset_fn.source
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
        waiting = len(self._queue)
        under_way = len(self._queue.under_way)
        return f"<{type(self).__name__} {workers=} {waiting=} {under_way=}>"

    def end(self) -> None:
        """Stop scheduling. Unfinished functions fail with UnavailableError, and later calls of `schedule` raise it.

        An error of a function that neither `join` nor `schedule` has raised is only printed, on stderr.

        Called by: the strategy's `shutdown`.

        Example, on several ranks::

            coordinator.join()
            coordinator.end()  # strategy.shutdown() includes it
        """
        self._dispatcher.end()

    def _call(self, fn: Callable[..., Any], argument: Any) -> Any:
        """Have the next free worker call `fn(argument)`, wait, and return the result.

        Raises: the error of `fn`, which does not cancel scheduled functions.
        """
        return self._put(fn, (argument,), {}, internal=True).get()

    def _put(
        self, fn: Callable[..., Any], args: Any, kwargs: Any, internal: bool = False
    ) -> RemoteValue:
        name = getattr(fn, "__qualname__", type(fn).__qualname__)
        try:
            payload, resources = self._resources.pack((fn, args, kwargs))
        except Exception as error:
            values = {f"function {name}": fn}
            for i, value in enumerate(args):
                values[f"argument {i} of {name}"] = value
            for key, value in kwargs.items():
                values[f"argument {key!r} of {name}"] = value
            raise_explained(values, self._resources.pack, error)
        resolve = self._cluster.references.resolve

        def unpack(packed: bytes) -> Any:
            return loads(packed, resolve)

        result = RemoteValue(self._queue.changed, unpack, name)
        self._queue.put(Closure(name, payload, resources, result, internal))
        self._dispatcher.hand_out()
        return result

    def __reduce__(self) -> Any:
        # A scheduled method may belong to an object that has the coordinator among its attributes.
        return OnTheChief, ()


class OnTheChief:
    """Takes the place of the coordinator in a scheduled function: each use raises RuntimeError."""

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(
            f"ClusterCoordinator.{name} was asked for on a worker; only the chief schedules functions"
        )

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # Before Python 3.11, pickle asks an object without this method for attributes that it lacks.
        return OnTheChief, ()


def _nothing(dataset: Any) -> None:
    """Do nothing: unpickling the argument has made the worker's dataset."""
