"""Pickles functions, their arguments and results by value. An object that each rank has is pickled as a key.

An error about an object that cannot be pickled names the path to the object.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import io
import pickle
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, Protocol

import cloudpickle
import numpy as np

from mpistrat.parameter_server.rpc.endpoint import outcome_of


class References(Protocol):
    """Gives keys to objects that each rank has: the strategy, its variables, and torch tensors on servers."""

    def reference_of(self, value: Any) -> Any | None:
        """Return the key of an object that each rank has; None for an object to be pickled by value."""

    def resolve(self, key: Any) -> Any:
        """Return this rank's object for a key from another rank."""

    def reduction_of(self, value: Any) -> tuple[Any, ...] | None:
        """Return a reduction (a tuple, as `__reduce__` returns) of a torch module or optimizer; None for other objects.

        Unpickling the reduction makes the other rank register the module or optimizer. Pickling calls `reduction_of`
        for objects without a key.
        """


# The methods of `References` that pickling calls.
ReferenceOf = Callable[[Any], Any | None]
ReductionOf = Callable[[Any], tuple[Any, ...] | None]


def dumps(
    value: Any, reference_of: ReferenceOf, reduction_of: ReductionOf = lambda value: None
) -> bytes:
    """Pickle `value`, with keys in place of the objects that each rank has. Raises: the error of pickling.

    Args: reference_of, reduction_of: methods of `References`.
    """
    with io.BytesIO() as file:
        _Pickler(file, reference_of, reduction_of).dump(value)
        return file.getvalue()


def loads(data: bytes, resolve: Callable[[Any], Any]) -> Any:
    return Unpickler(data, resolve).load()


# Types that are always pickled by value, as are numbers, strings and collections.
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
        self, file: io.BytesIO, reference_of: ReferenceOf, reduction_of: ReductionOf
    ) -> None:
        super().__init__(file, protocol=5)
        self._reference_of = reference_of
        self._reduction_of = reduction_of

    def reducer_override(self, value: Any) -> Any:
        # Pickle's own hook for keys, `persistent_id`, is slower: it is called for each occurrence of each object.
        if type(value) not in _COPIED:
            if (key := self._reference_of(value)) is not None:
                return _resolved, (key,)
            if (reduced := self._reduction_of(value)) is not None:
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
    """Marks a key in a pickle: `Unpickler` calls its own `resolve` in place of this function."""
    raise RuntimeError("a pickle for the ranks of a job can only be unpickled by `loads`")


_DEEPEST = 8
_Pack = Callable[[Any], object]


def raise_explained(values: Mapping[str, Any], pack: _Pack, error: Exception) -> NoReturn:
    """Raise an error that says why `values` could not be pickled.

    Args:
        values: the values, by the names that the error's text is to use.
        pack: pickles one value.
        error: the error of pickling all values together.
    Raises: TypeError that names the innermost part that cannot be pickled alone, such as "the function step → its
        variable 'trainer' → its attribute 'lock'"; `error` if each value can be pickled alone.
    """

    for name, value in values.items():
        refused = outcome_of(pack, value)
        if isinstance(refused, Exception):
            path, part, reason = _innermost(name, value, refused, pack)
            kind = type(part)
            type_name = kind.__qualname__
            if kind.__module__ != "builtins":
                type_name = f"{kind.__module__}.{type_name}"
            because = f"{type(reason).__name__}: {reason}"
            raise TypeError(
                f"cannot be pickled: {path}, of type {type_name} ({because}). "
                "Make it inside the function that uses it, or leave it out"
            ) from refused
    raise error


def _innermost(name: str, value: Any, error: Exception, pack: _Pack) -> tuple[str, Any, Exception]:
    """Descend from `value` to its innermost part that cannot be pickled alone, at most 8 levels deep.

    Returns: the descriptions on the way, joined by arrows; the part; and the error of pickling it.
    """
    path = [name]
    seen = {id(value)}
    while len(path) <= _DEEPEST:
        for description, part in _parts(value):
            if id(part) in seen:
                continue
            seen.add(id(part))
            refused = outcome_of(pack, part)
            if isinstance(refused, Exception):
                path.append(description)
                value = part
                error = refused
                break
        else:
            break
    return " → ".join(path), value, error


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a description and the value of each object that pickle would pickle with `value`."""
    if isinstance(value, types.FunctionType):
        yield from _captured(value)
    elif isinstance(value, types.MethodType):
        yield "the object it is bound to", value.__self__
    elif isinstance(value, functools.partial):
        yield "its function", value.func
        arguments = *enumerate(value.args), *value.keywords.items()
        yield from _labelled("its argument {!r}", arguments)
    elif isinstance(value, Mapping):
        yield from _labelled("its entry {!r:.40}", value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from _labelled("its element {}", enumerate(value))
    elif hasattr(value, "__dict__") and not _pickles_itself(type(value)):
        yield from _labelled("its attribute {!r}", vars(value).items())


def _labelled(text: str, parts: Iterable[tuple[Any, Any]]) -> Iterator[tuple[str, Any]]:
    return ((text.format(key), part) for key, part in parts)


def _pickles_itself(kind: type) -> bool:
    reduce: Any = kind.__reduce__
    return reduce is not object.__reduce__


def _captured(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        with contextlib.suppress(ValueError):  # not assigned to yet
            yield f"its variable {name!r}", cell.cell_contents
    variables = function.__globals__
    used = _names_of(function.__code__) & variables.keys()
    for name in sorted(used):
        yield f"its global variable {name!r}", variables[name]
    yield from _labelled("its default value {}", enumerate(function.__defaults__ or ()))
    defaults = function.__kwdefaults__ or {}
    yield from _labelled("its default value of {!r}", defaults.items())
    yield from _labelled("its attribute {!r}", vars(function).items())


def _names_of(code: types.CodeType) -> set[str]:
    """Return the names of globals and attributes that a function and the functions defined in it use."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_of(constant)
    return names
