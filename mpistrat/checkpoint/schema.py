"""Checks data from files against schemas. Schemas are plain data themselves.

A schema is
- a type: the value is exactly of this type, so that True is no int;
- a range: the value is an int in it;
- None: the value is None;
- a tuple of schemas: the value fits one of them;
- a list of one schema: the value is a list, and each element fits the schema;
- a dict of schemas: the value is a dict with these names, and perhaps others. A type in place of a name is for all
  names and values of the dict;
- a function: it is called with the value, and raises an error if the value is wrong.
"""

from __future__ import annotations

import contextlib
import json
import reprlib
from typing import Any

Schema = Any

MOST_BYTES_OF_JSON = 1 << 28
COUNT = range(1 << 63)
RANK = range(1 << 31)


def check(value: Any, schema: Schema, name: str) -> None:
    """Compare `value` with `schema`, and raise an error if it does not fit.

    Args:
        schema: a schema as this module describes it. The result of a function in it does not count.
        name: name of `value`, for the message.
    Raises: ValueError for the first part of `value` that does not fit, with the path to that part: "model.steps.0".
    """
    if callable(schema) and not isinstance(schema, type):
        try:
            schema(value)
        except Exception as error:  # any error of the function
            raise ValueError(f"{name} is wrong: {error}") from None
    elif not _fits(value, schema):
        raise ValueError(f"{name} is {reprlib.repr(value)}, not {_in_words(schema)}")
    elif isinstance(schema, list):
        for i, element in enumerate(value):
            check(element, schema[0], f"{name}.{i}")
    elif isinstance(schema, dict):
        for key, inner in schema.items():
            _check_entries(value, key, inner, name)


def _fits(value: Any, schema: Schema) -> bool:
    """Whether `value` fits a schema that is no function. Of a list or a dict only the kind is looked at."""
    if isinstance(schema, tuple):
        for option in schema:
            with contextlib.suppress(ValueError):
                check(value, option, "")
                return True
        return False
    if isinstance(schema, range):
        return type(value) is int and value in schema
    if isinstance(schema, type):
        return type(value) is schema
    return isinstance(value, type(schema))


def _check_entries(value: dict[Any, Any], key: Any, schema: Schema, name: str) -> None:
    """Check the entry `value[key]` against `schema`. If `key` is a type, check all names against it, and all entries.

    Raises: ValueError if the entry is missing or does not fit.
    """
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
        return " or ".join(_in_words(option) for option in schema)
    if isinstance(schema, range):
        return f"a whole number from {schema.start} to {schema.stop - 1}"
    if isinstance(schema, (dict, list)):
        return f"a {type(schema).__name__}"
    return getattr(schema, "__name__", repr(schema))


def parsed(text: bytes) -> Any:
    """Return the value of a JSON text.

    Raises: ValueError if it is no JSON, has NaN or infinity, is longer than `MOST_BYTES_OF_JSON`, or is nested too
        deeply.
    """
    if len(text) > MOST_BYTES_OF_JSON:
        raise ValueError(
            f"{len(text)} bytes of JSON are more than the {MOST_BYTES_OF_JSON} that are read"
        )
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    except MemoryError:
        raise ValueError(f"there is no memory for {len(text)} bytes of JSON") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
