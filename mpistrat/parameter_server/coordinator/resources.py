"""What each worker makes for itself, once, when a closure first needs it: datasets, iterators."""

from __future__ import annotations

import abc
import collections
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mpistrat.errors import ClosureInputError
from mpistrat.parameter_server.coordinator.pickling import References, dumps, loads

# Of a key: what it names.
_RESOURCE, _REFERENCE = range(2)


class Resource:
    """How a worker makes something of its own; the chief's side of it.

    Attributes:
        id: in the closures that need it.
        needs: resources of what it is made from.
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

    def with_needs(self) -> Iterator[Resource]:
        for needed in self.needs:
            yield from needed.with_needs()
        yield self

    def __del__(self) -> None:
        # Runs anywhere, and takes no locks therefore. No closure that needs it is left.
        self._dropped.append(self.id)


class PerWorker(abc.ABC):
    """A closure that is given this gets the executing worker's part of it."""

    @abc.abstractmethod
    def resource(self, table: ResourceTable) -> Resource:
        """How a worker makes its part."""


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

    def write(self, *makes: Callable[[], Any]) -> Resource:
        """Args: makes: one for all workers, or one for each. Raises: what pickling raises."""
        packed = [self.pack(make) for make in makes]
        return Resource(
            self, [data for data, _ in packed], [one for _, needs in packed for one in needs]
        )

    def pack(self, value: Any) -> tuple[bytes, list[Resource]]:
        """`value`, pickled, and the resources that it needs of a worker. Raises: what pickling raises."""
        needs: list[Resource] = []
        reference_of = functools.partial(self.reference_of, needs)
        return dumps(value, reference_of, self._references.reduction_of), needs

    def reference_of(self, needs: list[Resource], value: Any) -> Any | None:
        if isinstance(value, PerWorker):
            resource = value.resource(self)
            needs.append(resource)
            return _RESOURCE, resource.id
        key = self._references.reference_of(value)
        return None if key is None else (_REFERENCE, key)

    def resolve(self, key: Any) -> Any:
        """What a worker refers to."""
        return self._references.resolve(key[1])


class ResourceCache:
    """The resources that this worker has made, and the other objects that it resolves for what it unpickles."""

    def __init__(self, references: References) -> None:
        self._references = references
        self._packed: dict[int, bytes] = {}
        self._made: dict[int, Any] = {}

    def learn(self, resources: dict[int, bytes]) -> None:
        self._packed.update(resources)

    def forget(self, ids: Sequence[int]) -> None:
        for one in ids:
            self._packed.pop(one, None)
            self._made.pop(one, None)

    def reference_of(self, value: Any) -> Any | None:
        key = self._references.reference_of(value)
        return None if key is None else (_REFERENCE, key)

    def resolve(self, key: Any) -> Any:
        """Raises: ClosureInputError, when it cannot be made."""
        kind, inner = key
        if kind == _REFERENCE:
            return self._references.resolve(inner)
        if inner not in self._made:
            make = loads(self._packed[inner], self.resolve)
            try:
                self._made[inner] = make()
            except Exception as error:
                failed = ClosureInputError(
                    f"a worker could not make what a closure needs of it: {type(error).__name__}: {error}"
                )
                failed.original = error
                raise failed from error
        return self._made[inner]
