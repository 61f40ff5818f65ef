"""What each worker makes for itself, once, when a closure first needs it: datasets, iterators."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mpistrat.errors import ClosureInputError
from mpistrat.parameter_server.coordinator.pickling import References, dumps, loads


class _Key(NamedTuple):
    """Names a resource in what is pickled. All other keys are those of `References`."""

    resource: int


class Resource:
    """How workers make something of their own; the chief's side of it.

    Attributes:
        id: in the closures that need it.
        needs: the resources that it is made from.
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
        """`value`, pickled, and the resources that it needs of a worker. Raises: what pickling raises."""
        needs: list[Resource] = []

        def reference_of(part: Any) -> Any | None:
            if not isinstance(part, PerWorker):
                return self._references.reference_of(part)
            needs.append(part.resource(self))
            return _Key(needs[-1].id)

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
