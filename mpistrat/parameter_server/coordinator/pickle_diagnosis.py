"""What in a value cannot be pickled, told as its owner would look for it."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

_DEEPEST = 8


class UnpicklablePart(NamedTuple):
    """The innermost part that cannot be pickled.

    Attributes: path: "the function step → its variable 'trainer' → its attribute 'lock'".
    """

    path: str
    part: Any
    error: BaseException


def find_unpicklable(
    value: Any,
    name: str,
    error: BaseException,
    try_it: Callable[[Any], BaseException | None],
) -> UnpicklablePart:
    """Go down from `value`, which raised `error`, as long as some part raises when it is tried alone."""
    path, seen = [name], {id(value)}
    while len(path) <= _DEEPEST:
        for description, part in _parts(value):
            if id(part) in seen:
                continue
            seen.add(id(part))
            refused = try_it(part)
            if refused is not None:
                path.append(description)
                value, error = part, refused
                break
        else:
            break
    return UnpicklablePart(" → ".join(path), value, error)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What is pickled with `value`, and what its owner calls it."""
    if isinstance(value, types.FunctionType):
        yield from _captured(value)
    elif isinstance(value, types.MethodType):
        yield "the object it is bound to", value.__self__
    elif isinstance(value, functools.partial):
        yield "its function", value.func
        yield from ((f"its argument {i}", one) for i, one in enumerate(value.args))
        yield from ((f"its argument {name!r}", one) for name, one in value.keywords.items())
    elif isinstance(value, Mapping):
        yield from ((f"its entry {key!r:.40}", one) for key, one in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"its element {i}", one) for i, one in enumerate(value))
    elif hasattr(value, "__dict__") and not _pickles_itself(type(value)):
        yield from ((f"its attribute {name!r}", one) for name, one in vars(value).items())


def _pickles_itself(kind: type) -> bool:
    return any("__reduce__" in vars(one) for one in kind.__mro__[:-1])


def _captured(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        try:
            yield f"its variable {name!r}", cell.cell_contents
        except ValueError:  # not assigned to yet
            continue
    for name in sorted(_names_of(function.__code__)):
        if name in function.__globals__:
            yield f"its global variable {name!r}", function.__globals__[name]
    for i, one in enumerate(function.__defaults__ or ()):
        yield f"its default value {i}", one
    for name, one in (function.__kwdefaults__ or {}).items():
        yield f"its default value of {name!r}", one
    for name, one in vars(function).items():
        yield f"its attribute {name!r}", one


def _names_of(code: types.CodeType) -> set[str]:
    """Names of globals, and of attributes, that a function and those in it use."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_of(constant)
    return names
