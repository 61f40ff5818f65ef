"""How functions, their arguments and results travel: by value, but for what each rank has, which travels as a key."""

from __future__ import annotations

import collections
import io
import pickle
import types
from collections.abc import Callable
from typing import Any, Protocol

import cloudpickle
import numpy as np

from mpistrat.coordinator.culprits import find_culprit


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

    found = find_culprit(value, name, error, try_it)
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
        *(
            type(None),
            bool,
            int,
            float,
            complex,
            str,
            bytes,
            tuple,
            list,
            dict,
            set,
            frozenset,
            type,
        ),
        *(
            types.FunctionType,
            types.BuiltinFunctionType,
            types.CodeType,
            types.CellType,
            types.ModuleType,
        ),
        *(collections.OrderedDict, np.ndarray),
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

    def persistent_id(self, value: Any) -> Any | None:
        # Asked of every object: a model of torch's has ten thousands, most of them of these.
        return None if type(value) in _COPIED else self._reference_of(value)

    def reducer_override(self, value: Any) -> Any:
        reduced = self._reduction_of(value)
        return super().reducer_override(value) if reduced is None else reduced


class Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, resolve: Callable[[Any], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._resolve = resolve

    def persistent_load(self, key: Any) -> Any:
        return self._resolve(key)
