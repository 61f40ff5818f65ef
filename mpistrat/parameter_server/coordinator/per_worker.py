"""Values with a part on each worker: a closure gets the part of the worker that executes it.

A part is a resource: what a worker makes for itself, once, when a closure first needs it.
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
    """Names a resource in what is pickled. All other keys are those of `References`."""

    resource: int


class Resource:
    """How workers make something of their own; the chief's side of it.

    Attributes:
        id: in the closures that need it.
        needs: all resources that it is made from, the needs of these included.
    """

    def __init__(
        self, table: ResourceTable, packed: Sequence[bytes], needs: Sequence[Resource]
    ) -> None:
        self.id = next(table.ids)
        self.needs = needs
        self._packed = packed
        self._dropped = table.dropped

    def packed_for(self, worker: int) -> bytes:
        """A function without arguments, pickled."""
        return self._packed[worker % len(self._packed)]

    def __del__(self) -> None:
        # Runs anywhere, and takes no locks therefore. No closure that needs it is left.
        self._dropped.append(self.id)


class PerWorker:
    """A closure gets the executing worker's part of this."""

    _resource: Resource

    def resource(self, table: ResourceTable) -> Resource:
        """How a worker makes its part."""
        return self._resource


class ResourceTable:
    """The resources of a coordinator, and how it packs what it sends.

    Args: workers: how many there are.
    Attributes: dropped: the ids of resources that nobody has any more, for the workers to forget.
    """

    def __init__(self, references: References, workers: int) -> None:
        self.workers = workers
        self.ids = itertools.count(1)
        self.dropped: collections.deque[int] = collections.deque()
        self._references = references

    def add(self, *makes: Callable[[], Any]) -> Resource:
        """Args: makes: a function for all workers, or one for each. Raises: what pickling raises."""
        packed, needs = zip(*map(self.pack, makes), strict=True)
        return Resource(self, packed, [*itertools.chain(*needs)])

    def pack(self, value: Any) -> tuple[bytes, list[Resource]]:
        """`value`, pickled, and all resources that it needs of a worker. Raises: the error of pickling."""
        needs: list[Resource] = []

        def reference_of(part: Any) -> Any | None:
            if not isinstance(part, PerWorker):
                return self._references.reference_of(part)
            resource = part.resource(self)
            needs.extend((*resource.needs, resource))
            return _Key(resource.id)

        return dumps(value, reference_of, self._references.reduction_of), needs


class ResourceCache:
    """The resources that this worker has made, and the other objects that it resolves for what it unpickles."""

    def __init__(self, references: References) -> None:
        self._references = references
        self._packed: dict[int, bytes] = {}
        self._made: dict[int, Any] = {}

    def update(self, packed: Mapping[int, bytes], dropped: Sequence[int]) -> None:
        """Args: packed: new resources, by id. dropped: ids of resources to forget."""
        self._packed.update(packed)
        for resource in dropped:
            self._packed.pop(resource, None)
            self._made.pop(resource, None)

    def resolve(self, key: Any) -> Any:
        """Raises: ClosureInputError, when it cannot be made."""
        if not isinstance(key, _Key):
            return self._references.resolve(key)
        if key.resource not in self._made:
            make = loads(self._packed[key.resource], self.resolve)
            try:
                self._made[key.resource] = make()
            except Exception as error:
                failed = ClosureInputError(
                    f"a worker could not make what a closure needs of it: {type(error).__name__}: {error}"
                )
                failed.original = error
                raise failed from error
        return self._made[key.resource]


Call = Callable[[Callable[..., Any], Any], Any]  # a function and its argument, on any worker


class PerWorkerValues(PerWorker):
    """A value for each worker, in their order; a scheduled function gets that of the worker that executes it.

    Args: values: RemoteValues.
    Raises: AssertionError for anything else.
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
        """Waits for the values. Raises: their errors; ValueError for another number of them."""
        if len(self._values) != table.workers:
            raise ValueError(
                f"PerWorkerValues has {len(self._values)} values, and there are {table.workers} workers"
            )
        if not hasattr(self, "_resource"):
            makes = [functools.partial(_same, value.get()) for value in self._values]
            self._resource = table.add(*makes)
        return self._resource


class PerWorkerDataset(PerWorker, Iterable[Any]):
    """A dataset that each worker has for itself; made by `ClusterCoordinator.create_per_worker_dataset`."""

    def __init__(self, resource: Resource, table: ResourceTable, call: Call) -> None:
        self._resource, self._resources, self._call = resource, table, call

    def __iter__(self) -> PerWorkerDistributedIterator:
        """An iterator for each worker, which begins when a closure first gets it."""
        return PerWorkerDistributedIterator(self, self._resources)

    @functools.cached_property
    def element_spec(self) -> Any:
        """The structure of an element, with an ArraySpec for each array; a worker reads its first one."""
        return self._call(DatasetOfWorker.element_spec, self)


class PerWorkerDistributedIterator(PerWorker, Iterator[Any]):
    """An iterator for each worker: pass it to `schedule`, as an argument.

    The function gets the iterator of its worker, and calls `next` on it. If `next` raises StopIteration, the closure's
    error is an OutOfRangeError.
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


class DatasetOfWorker:
    """A worker's dataset."""

    def __init__(self, source: Any) -> None:
        dataset = source if isinstance(source, Iterable) else source()
        if not isinstance(dataset, Iterable):
            raise ValueError(
                f"a dataset function must return a dataset, which can be iterated; got {dataset!r:.60}"
            )
        self._dataset = safe_dataset(dataset)
        self._begun: IteratorOfWorker | None = None  # for its spec; the next one
        self._last: weakref.ref[IteratorOfWorker] | None = None

    def iterate(self) -> IteratorOfWorker:
        iterator, self._begun = self._begun or IteratorOfWorker(iter(self._dataset)), None
        self._last = weakref.ref(iterator)
        return iterator

    def element_spec(self) -> Any:
        """Of the iterator that goes on, where there is one: a generator has no other elements."""
        running = None if self._last is None else self._last()
        first = running.peek() if running else []
        if not first:
            self._begun = self._begun or IteratorOfWorker(iter(self._dataset))
            first = self._begun.peek()
        if not first:
            raise ValueError("the dataset has no elements: what they look like is not known")
        return spec_of(first[0])


class IteratorOfWorker(Iterator[Any]):
    """A worker's iterator, as a scheduled function gets it."""

    def __init__(self, elements: Iterator[Any]) -> None:
        self._elements = elements

    def __next__(self) -> Any:
        return next(self._elements)

    def peek(self) -> list[Any]:
        """The next element, which stays the next; none at the end."""
        first = [*itertools.islice(self._elements, 1)]
        self._elements = itertools.chain(first, self._elements)
        return first

    def get_next(self) -> Any:
        """The next element. Raises: OutOfRangeError at the end."""
        for element in self._elements:
            return element
        raise OutOfRangeError("the worker's dataset has no more elements")

    def get_next_as_optional(self) -> Optional:
        for element in self._elements:
            return Optional(element, True)
        return Optional(None, False)


def _same(value: Any) -> Any:
    return value
