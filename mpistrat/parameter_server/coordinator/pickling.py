"""How functions, their arguments and results travel: by value, but for what each rank has, which travels as a key."""

from __future__ import annotations

import collections
import io
import pickle
import types
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import cloudpickle
import numpy as np

from mpistrat.parameter_server.coordinator.pickle_diagnosis import find_unpicklable


class References(Protocol):
    """Objects that each rank has, or has a part of: the strategy, variables, modules made in its scope."""

    def reference_of(self, value: Any) -> Any | None:
        """The key of such an object; None for all others."""
        ...

    def resolve(self, key: Any) -> Any:
        """This rank's object."""
        ...

    def reduction_of(self, value: Any) -> tuple[Any, ...] | None:
        """How an object is copied that the other side is to take note of, as of `__reduce__`; None for all others."""
        ...


def _as_usual(value: Any) -> None:
    return None


def dumps(
    value: Any,
    reference_of: Callable[[Any], Any | None],
    reduction_of: Callable[[Any], tuple[Any, ...] | None] = _as_usual,
) -> bytes:
    """Args: as of `References`. Raises: whatever the pickling raises."""
    with io.BytesIO() as file:
        _Pickler(file, reference_of, reduction_of).dump(value)
        return file.getvalue()


def loads(data: bytes, resolve: Callable[[Any], Any]) -> Any:
    return Unpickler(data, resolve).load()


def explain(
    value: Any, name: str, reference_of: Callable[[Any], Any | None], error: BaseException
) -> TypeError:
    """What in `value`, which people know by this name, raised `error` when it was pickled."""

    def try_it(part: Any) -> BaseException | None:
        try:
            dumps(part, reference_of)
        except Exception as refused:
            return refused
        return None

    found = find_unpicklable(value, name, error, try_it)
    kind = type(found.part)
    of_kind = kind.__qualname__ if kind.__module__ == "builtins" else _full_name(kind)
    reason = f"{type(found.error).__name__}: {found.error}"
    explained = TypeError(
        f"cannot be pickled: {found.path}, of type {of_kind} ({reason}). Make it where it is used, or leave it out"
    )
    explained.__cause__ = error
    return explained


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


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
)  # always; and numbers, strings and collections, of which pickle does not ask


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
    """What a key refers to, as it is written: whoever reads has a function of its own for it."""
    raise RuntimeError("what was pickled for the ranks of a job is unpickled by `loads`")
