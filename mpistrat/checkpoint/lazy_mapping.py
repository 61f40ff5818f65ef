"""A mapping that makes or reads a value when it is looked up."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

K = TypeVar("K")


class LazyMapping(Mapping[K, Any]):
    """A mapping that makes a value at each look-up, and keeps none. `in`, `len` and iteration make no values.

    Args:
        keys: all keys.
        get: function that returns the value of a key, called at each look-up.
    """

    def __init__(self, keys: Collection[K], get: Callable[[K], Any]) -> None:
        self._keys = keys
        self._get = get

    def __getitem__(self, key: K) -> Any:
        if key not in self._keys:
            raise KeyError(key)
        return self._get(key)

    def __contains__(self, key: object) -> bool:
        return key in self._keys  # does not make the value

    def __iter__(self) -> Iterator[K]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)
