"""Values with a part on each worker: a closure gets the part of the worker that executes it.

A resource describes such a value. Each worker makes its part once, when a closure first needs it.
"""

from __future__ import annotations

import collections
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, cast

from mpistrat.errors import ClosureInputError, OutOfRangeError
from mpistrat.input.batches import spec_of
from mpistrat.input.distributed_dataset import Optional
from mpistrat.input.distribution import safe_dataset
from mpistrat.parameter_server.coordinator.pickling import References, dumps, loads
from mpistrat.parameter_server.coordinator.remote_value import RemoteValue


class _Key(NamedTuple):
    """The key of a resource in a pickle. `ResourceCache` passes any other key to `References.resolve`."""

    resource: int


class Resource:
    """The chief's description of a value with a part on each worker: the pickled functions that make the parts.

    A worker gets its function with the first closure that needs the part (`ResourceCache`), and makes the part. When
    the chief drops its last reference to the resource, the workers forget their parts.

    Args: packed: the pickled functions, without arguments: one for all workers, or one for each worker.
    Attributes:
        id: the resource's number, from 1.
        needs: all resources that the functions use, directly or not.
    """

    def __init__(
        self, table: ResourceTable, packed: Sequence[bytes], needs: Sequence[Resource]
    ) -> None:
        self.id = next(table.ids)
        self.needs = needs
        self._packed = packed
        self._dropped = table.dropped

    def packed_for(self, worker: int) -> bytes:
        """Return the pickled function without arguments that makes the part of a worker (index from 0)."""
        return self._packed[worker % len(self._packed)]

    def __del__(self) -> None:
        # May run in any thread at any point, so it takes no locks. No closure needs the resource.
        self._dropped.append(self.id)


class PerWorker:
    """The coordinator's handle of a value that each worker has its own part of: a base class.

    A user passes it to `schedule`. The function gets, in its place, the part of the worker that executes it. The worker
    makes this part on first use and keeps it; the coordinator has only the `Resource`, the functions that make parts.
    """

    _resource: Resource

    def resource(self, table: ResourceTable) -> Resource:
        """Return the resource that makes the workers' parts. Called by: `ResourceTable.pack`, to pickle a closure."""
        return self._resource


class ResourceTable:
    """Makes the resources (values with a part on each worker) of a coordinator, and pickles its closures.

    In a pickle, a key with the resource's number replaces each `PerWorker` object; the worker's `ResourceCache` finds
    the worker's part for the key.

    Attributes:
        ids: the next resource's number, from 1.
        dropped: the ids of resources that the chief has dropped, so that the workers have to be told to forget them.
    """

    def __init__(self, references: References, workers: int) -> None:
        self.workers = workers
        self.ids = itertools.count(1)
        self.dropped: collections.deque[int] = collections.deque()
        self._references = references

    def add(self, *makes: Callable[[], Any]) -> Resource:
        """Pickle the functions of a new resource, and return the resource.

        Args: makes: one function for all workers, or one for each worker.
        Raises: the error of pickling.
        """
        packed = []
        needs: list[Resource] = []
        for make in makes:
            payload, resources = self.pack(make)
            packed.append(payload)
            needs += resources
        return Resource(self, packed, needs)

    def pack(self, value: Any) -> tuple[bytes, list[Resource]]:
        """Return `value` pickled, and all resources that a worker needs to unpickle it (also indirectly).

        Raises: the error of pickling.
        """
        needs: list[Resource] = []

        def reference_of(part: Any) -> Any | None:
            if not isinstance(part, PerWorker):
                return self._references.reference_of(part)
            resource = part.resource(self)
            needs.extend((*resource.needs, resource))
            return _Key(resource.id)

        return dumps(value, reference_of, self._references.reduction_of), needs


class ResourceCache:
    """A worker's own parts of resources (values with a part on each worker), made on first use.

    While the worker unpickles a closure, `resolve` replaces each key in the pickle by the worker's part.
    """

    def __init__(self, references: References) -> None:
        self._references = references
        self._packed: dict[int, bytes] = {}
        self._made: dict[int, Any] = {}

    def update(self, packed: Mapping[int, bytes], dropped: Sequence[int]) -> None:
        """Store the pickled functions of new resources, by id, and forget the ids in `dropped`."""
        self._packed.update(packed)
        for resource in dropped:
            self._packed.pop(resource, None)
            self._made.pop(resource, None)

    def resolve(self, key: Any) -> Any:
        """Return this worker's object for a key; make its part of a resource on first use.

        Raises: ClosureInputError if making the part fails; its `original` is the error.
        """
        if not isinstance(key, _Key):
            return self._references.resolve(key)
        resource = key.resource
        if resource not in self._made:
            make = loads(self._packed[resource], self.resolve)
            try:
                self._made[resource] = make()
            except Exception as error:
                failed = ClosureInputError(
                    f"a worker could not make its part of a per-worker value: {type(error).__name__}: {error}"
                )
                failed.original = error
                raise failed from error
        return self._made[resource]


Call = Callable[[Callable[..., Any], Any], Any]  # has any worker call a function with one argument


class PerWorkerValues(PerWorker):
    """A value for each worker; a scheduled function gets the value of the worker that executes it.

    Args: values: a RemoteValue for each worker, in the order of worker indices.
    Raises: AssertionError for values that are no RemoteValues.

    Example, on several ranks::

        seeds = [coordinator.schedule(int, args=(seed,)) for seed in (17, 42)]  # two workers
        seed = ms.coordinator.PerWorkerValues(seeds)
        draw = lambda seed: np.random.default_rng(seed).random()
        coordinator.schedule(draw, args=(seed,))  # worker 0 gets 17, worker 1 gets 42
    """

    def __init__(self, values: Sequence[RemoteValue]) -> None:
        for value in values:
            if not isinstance(value, RemoteValue):
                raise AssertionError(
                    f"PerWorkerValues takes a RemoteValue for each worker, got {value!r:.60}"
                )
        self._values = tuple(values)

    def __repr__(self) -> str:
        return f"PerWorkerValues({list(self._values)!r:.400})"

    def resource(self, table: ResourceTable) -> Resource:
        """Wait for the values, and return the resource that gives each worker its value.

        Called by: `ClusterCoordinator.schedule`.
        Raises: the error of a value's function; ValueError if the number of values is not the number of workers.

        Example, on several ranks::

            seed = ms.coordinator.PerWorkerValues(seeds)
            seed.resource(table)  # schedule() calls it with the coordinator's ResourceTable
        """
        if len(self._values) != table.workers:
            raise ValueError(
                f"PerWorkerValues has {len(self._values)} values, and there are {table.workers} workers"
            )
        if not hasattr(self, "_resource"):
            makes = [functools.partial(_same, value.get()) for value in self._values]
            self._resource = table.add(*makes)
        return self._resource


PerWorkerValue = PerWorkerValues  # a name of it in tf.distribute.coordinator


class PerWorkerDataset(PerWorker, Iterable[Any]):
    """A dataset with a copy on each worker. Made by: `ClusterCoordinator.create_per_worker_dataset`."""

    def __init__(self, resource: Resource, table: ResourceTable, call: Call) -> None:
        self._resource = resource
        self._resources = table
        self._call = call

    def __iter__(self) -> PerWorkerDistributedIterator:
        """Return an iterator for each worker. A worker begins its iterator when a closure first gets it."""
        return PerWorkerDistributedIterator(self, self._resources)

    @functools.cached_property
    def element_spec(self) -> Any:
        """The structure of an element, with an ArraySpec for each array. Asks the next free worker, and waits, once."""
        return self._call(DatasetOfWorker.element_spec, self)


class PerWorkerDistributedIterator(PerWorker, Iterator[Any]):
    """An iterator for each worker, to be passed to `schedule` as an argument.

    The function calls `next` on its worker's iterator; StopIteration becomes OutOfRangeError on the chief. `next` on
    the chief raises NotImplementedError.
    """

    def __init__(self, dataset: PerWorkerDataset, table: ResourceTable) -> None:
        self._dataset = dataset
        of_worker = cast(DatasetOfWorker, dataset)  # as the worker unpickles it
        self._resource = table.add(functools.partial(DatasetOfWorker.iterate, of_worker))

    @property
    def element_spec(self) -> Any:
        return self._dataset.element_spec

    def __next__(self) -> NoReturn:
        raise NotImplementedError(
            "each worker has an iterator of its own: pass this one to ClusterCoordinator.schedule, as an argument, and "
            "call next() in the scheduled function"
        )

    get_next = get_next_as_optional = __next__


class UnbuiltDataset(Iterable[Any]):
    """The result of a ParameterServerStrategy's `experimental_distribute_dataset`, for `create_per_worker_dataset`.

    Iterating over it raises ValueError.

    Args: source: a dataset, or a function that returns a dataset on a worker.
    """

    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> NoReturn:
        raise ValueError(
            "the workers have the datasets of a ParameterServerStrategy: pass this to "
            "ClusterCoordinator.create_per_worker_dataset"
        )

    cardinality = element_spec = property(__iter__)


class DatasetOfWorker:
    """The dataset of one worker.

    Args: source: a dataset, or a function that returns one. The function may call the strategy's
        `distribute_datasets_from_function` or `experimental_distribute_dataset`.
    Raises: ValueError if the function returns an object that is not iterable.
    """

    def __init__(self, source: Any) -> None:
        dataset = _built(source)
        if isinstance(dataset, UnbuiltDataset):
            dataset = _built(dataset.source)
        if not isinstance(dataset, Iterable):
            raise ValueError(
                f"a dataset function must return a dataset, which can be iterated; got {dataset!r:.60}"
            )
        self._dataset = safe_dataset(dataset)
        self._begun: IteratorOfWorker | None = None  # `element_spec` makes, `iterate` takes it
        self._last: weakref.ref[IteratorOfWorker] | None = None

    def iterate(self) -> IteratorOfWorker:
        iterator = self._begun or IteratorOfWorker(iter(self._dataset))
        self._begun = None
        self._last = weakref.ref(iterator)
        return iterator

    def element_spec(self) -> Any:
        """Return the structure of the next element of the iterator in use, or of a new iterator, without consuming it.

        The next `iterate` returns the new iterator.

        Raises: ValueError if the dataset is empty.
        """
        running = None if self._last is None else self._last()
        first = running.peek() if running else []
        if not first:
            self._begun = self._begun or IteratorOfWorker(iter(self._dataset))
            first = self._begun.peek()
        if not first:
            raise ValueError("the dataset has no elements, so that element_spec is not known")
        return spec_of(first[0])


class IteratorOfWorker(Iterator[Any]):
    """A worker's iterator over its dataset, as a scheduled function gets it in place of the chief's iterator."""

    def __init__(self, elements: Iterator[Any]) -> None:
        self._elements = elements

    def __next__(self) -> Any:
        return next(self._elements)

    def peek(self) -> list[Any]:
        """Return a list with the next element alone, without consuming the element; [] at the end."""
        first = [*itertools.islice(self._elements, 1)]
        self._elements = itertools.chain(first, self._elements)
        return first

    def get_next(self) -> Any:
        """Return the next element. Raises: OutOfRangeError at the end."""
        for element in self._elements:
            return element
        raise OutOfRangeError("the worker's dataset has no more elements")

    def get_next_as_optional(self) -> Optional:
        for element in self._elements:
            return Optional(element, True)
        return Optional(None, False)


def _built(source: Any) -> Any:
    """Return a dataset: `source` itself, or the result of a function."""
    if isinstance(source, Iterable):
        return source
    return source()


def _same(value: Any) -> Any:
    return value
