"""How functions, their arguments and results are pickled: by value, but what each rank has is sent as a key."""

from __future__ import annotations

import collections
import io
import pickle
import types
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import cloudpickle
import numpy as np


class References(Protocol):
    """Objects that each rank has, or has a part of: the strategy, variables, modules made in its scope."""

    def reference_of(self, value: Any) -> Any | None:
        """The key of such an object; None for all others."""

    def resolve(self, key: Any) -> Any:
        """This rank's object."""

    def reduction_of(self, value: Any) -> tuple[Any, ...] | None:
        """For an object that the other side is to take note of: its `__reduce__`; None for all others."""


def dumps(
    value: Any,
    reference_of: Callable[[Any], Any | None],
    reduction_of: Callable[[Any], tuple[Any, ...] | None] = lambda value: None,
) -> bytes:
    """Args: as of `References`. Raises: whatever the pickling raises."""
    with io.BytesIO() as file:
        _Pickler(file, reference_of, reduction_of).dump(value)
        return file.getvalue()


def loads(data: bytes, resolve: Callable[[Any], Any]) -> Any:
    return Unpickler(data, resolve).load()


# Always copied; so are numbers, strings and collections, of which pickle does not ask.
_COPIED = frozenset(
    {
        type,
        types.FunctionType,
        types.BuiltinFunctionType,
        types.CodeType,
        types.CellType,
        types.ModuleType,
        collections.OrderedDict,
        np.ndarray,
    }
)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(
        self,
        file: io.BytesIO,
        reference_of: Callable[[Any], Any | None],
        reduction_of: Callable[[Any], tuple[Any, ...] | None],
    ) -> None:
        super().__init__(file, protocol=5)
        self._reference_of, self._reduction_of = reference_of, reduction_of

    def reducer_override(self, value: Any) -> Any:
        # Pickle's own way for such keys, `persistent_id`, is asked of each occurrence of each number and string.
        if type(value) not in _COPIED:
            key = self._reference_of(value)
            if key is not None:
                return _resolved, (key,)
            reduced = self._reduction_of(value)
            if reduced is not None:
                return reduced
        return super().reducer_override(value)


class Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, resolve: Callable[[Any], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._resolve = resolve

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, _resolved.__name__):
            return self._resolve
        return super().find_class(module, name)


def _resolved(key: Any) -> NoReturn:
    """Stands in a pickle for the reader's own `resolve`."""
    raise RuntimeError("what was pickled for the ranks of a job is unpickled by `loads`")
