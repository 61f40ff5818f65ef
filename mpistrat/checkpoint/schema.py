"""What data of a file must look like, said in plain data.

A schema is
- a type: the value is exactly of it, so that True is no int;
- a range: an int in it;
- None: None;
- a tuple of schemas: one of them;
- a list of one schema: a list of such values;
- a dict of schemas: a dict that has these names and perhaps others; with a type as the name, a dict whose names and
  values are all such;
- a function: it is called with the value, and raises what is wrong with it.
"""

from __future__ import annotations

import json
import reprlib
from typing import Any

Schema = Any

MOST_BYTES_OF_JSON = 1 << 28
COUNT = range(1 << 63)
RANK = range(1 << 31)


def check(value: Any, schema: Schema, name: str) -> None:
    """Raises: ValueError naming the part of `value` that does not fit `schema`.

    Args: name: of `value`, in the message.
    """
    if not _is(value, schema):
        raise ValueError(f"{name} is {reprlib.repr(value)}, not {_in_words(schema)}")
    if isinstance(schema, dict):
        for key, inner in schema.items():
            _check_entries(value, key, inner, name)
    elif isinstance(schema, list):
        for i, element in enumerate(value):
            check(element, schema[0], f"{name}.{i}")
    elif callable(schema) and not isinstance(schema, type):
        try:
            schema(value)
        except Exception as error:  # of those who take such a value
            raise ValueError(f"{name} is wrong: {error}") from None


def _is(value: Any, schema: Schema) -> bool:
    """Whether `value` is of the type that `schema` asks for; `check` looks at what is in it."""
    if isinstance(schema, tuple):
        return any(_fits(value, option) for option in schema)
    if isinstance(schema, range):
        return type(value) is int and value in schema
    if isinstance(schema, type):
        return type(value) is schema
    if isinstance(schema, (dict, list)):
        return isinstance(value, type(schema))
    return schema is not None or value is None


def _fits(value: Any, schema: Schema) -> bool:
    try:
        check(value, schema, "")
    except ValueError:
        return False
    return True


def _check_entries(value: dict[Any, Any], key: Any, schema: Schema, name: str) -> None:
    """That of `value` called `key`; all of them, if `key` is a type."""
    if isinstance(key, type):
        for entry_name, entry in value.items():
            check(entry_name, key, f"a name in {name}")
            check(entry, schema, f"{name}.{reprlib.repr(entry_name)}")
    elif key in value:
        check(value[key], schema, f"{name}.{key}")
    else:
        raise ValueError(f"{name} has no {key!r}")


def _in_words(schema: Schema) -> str:
    if isinstance(schema, tuple):
        return " or ".join(map(_in_words, schema))
    if isinstance(schema, range):
        return f"a whole number from {schema.start} to {schema.stop - 1}"
    if isinstance(schema, (dict, list)):
        return f"a {type(schema).__name__}"
    return getattr(schema, "__name__", repr(schema))


def parsed(text: bytes) -> Any:
    """What JSON says. Raises: ValueError for what is none, or has more in it than Python can hold."""
    if len(text) > MOST_BYTES_OF_JSON:
        raise ValueError(
            f"{len(text)} bytes of JSON are more than the {MOST_BYTES_OF_JSON} that are read"
        )
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("brackets in brackets, too many of them") from None
    except MemoryError:
        raise ValueError(f"no memory for {len(text)} bytes of JSON") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name}, which is no JSON")
