"""What in a value cannot be pickled, by the path on which its owner would look for it."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

_DEEPEST = 8


def raise_explained(
    values: Mapping[str, Any], pack: Callable[[Any], object], error: Exception
) -> NoReturn:
    """Say why `values` could not be pickled together.

    Args:
        values: by the names that people know them by.
        pack: pickles a value.
        error: what pickling all of them raised.
    Raises: TypeError that names the innermost part that fails alone, such as "the function step → its variable
        'trainer' → its attribute 'lock'"; `error` where nothing fails alone.
    """

    def attempt(part: Any) -> Exception | None:
        try:
            pack(part)
        except Exception as refused:
            return refused
        return None

    for name, value in values.items():
        refused = attempt(value)
        if refused is not None:
            path, part, reason = _innermost(name, value, refused, attempt)
            kind = type(part)
            module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
            raise TypeError(
                f"cannot be pickled: {path}, of type {module}{kind.__qualname__} ({type(reason).__name__}: {reason}). "
                "Make it where it is used, or leave it out"
            ) from refused
    raise error


def _innermost(
    name: str, value: Any, error: Exception, attempt: Callable[[Any], Exception | None]
) -> tuple[str, Any, Exception]:
    """Goes down from `value`, which raised `error`, as long as a part raises when it is tried alone."""
    path, seen = [name], {id(value)}
    while len(path) <= _DEEPEST:
        for description, part in _parts(value):
            if id(part) in seen:
                continue
            seen.add(id(part))
            refused = attempt(part)
            if refused is not None:
                path.append(description)
                value, error = part, refused
                break
        else:
            break
    return " → ".join(path), value, error


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What is pickled with `value`, and what its owner calls it."""
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
    return any("__reduce__" in vars(base) for base in kind.__mro__[:-1])


def _captured(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        try:
            yield f"its variable {name!r}", cell.cell_contents
        except ValueError:  # not assigned to yet
            continue
    variables = function.__globals__
    names = sorted(_names_of(function.__code__) & variables.keys())
    yield from _labelled("its global variable {!r}", ((name, variables[name]) for name in names))
    yield from _labelled("its default value {}", enumerate(function.__defaults__ or ()))
    defaults = function.__kwdefaults__ or {}
    yield from _labelled("its default value of {!r}", defaults.items())
    yield from _labelled("its attribute {!r}", vars(function).items())


def _names_of(code: types.CodeType) -> set[str]:
    """Names of globals, and of attributes, that a function and those in it use."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_of(constant)
    return names
