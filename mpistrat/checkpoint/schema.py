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
    """Raises: ValueError, which says what in `value`, which is called `name`, is not as `schema` has it."""
    if isinstance(schema, tuple):
        if not any(_fits(value, option) for option in schema):
            _refuse(value, schema, name)
    elif isinstance(schema, dict):
        if not isinstance(value, dict):
            _refuse(value, schema, name)
        for key, inner in schema.items():
            if not isinstance(key, type):
                if key not in value:
                    raise ValueError(f"{name} has no {key!r}")
                check(value[key], inner, f"{name}.{key}")
                continue
            for own, content in value.items():
                check(own, key, f"a name in {name}")
                check(content, inner, f"{name}.{reprlib.repr(own)}")
    elif isinstance(schema, list):
        if not isinstance(value, list):
            _refuse(value, schema, name)
        for i, content in enumerate(value):
            check(content, schema[0], f"{name}.{i}")
    elif not (schema is None or isinstance(schema, (type, range))):
        try:
            schema(value)
        except Exception as error:  # of those who take such a value
            raise ValueError(f"{name} is wrong: {error}") from None
    elif not _is(value, schema):
        _refuse(value, schema, name)


def _fits(value: Any, schema: Schema) -> bool:
    try:
        check(value, schema, "")
    except ValueError:
        return False
    return True


def _is(value: Any, schema: type | range | None) -> bool:
    if isinstance(schema, range):
        return type(value) is int and value in schema
    return value is None if schema is None else type(value) is schema


def _refuse(value: Any, schema: Schema, name: str) -> None:
    raise ValueError(f"{name} is {reprlib.repr(value)}, not {_in_words(schema)}")


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
