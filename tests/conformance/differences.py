"""Where this project differs from the recording on purpose: the rules of differences.toml."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from conformance import (
    differing_input,
    differing_preemption,
    differing_resolvers,
    differing_results,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = Path(__file__).parent / "differences.toml"
_ABSENT = object()
_COMPUTING = (differing_results, differing_resolvers, differing_input, differing_preemption)
_SHORT = {"op": "program.op", "error": "expect.error"}


@dataclass(frozen=True)
class Difference:
    """Cases whose fields have the values in `match`; they must come to `instead`.

    A difference that no recorded case shows has a `test` in place of both: "mpi/test_variables.py::test_name".
    `match` maps dotted fields of a case ("op" is short for "program.op", "error" for "expect.error"; numbers are
    places in lists) to a value, or to a list of values of which one must fit. Some texts stand for more than
    themselves: "a*" fits what starts with a, ">1" and "<0" numbers, "zeros" numbers and lists that hold only zeros,
    "null" None, "absent" a field that is not there, "batches of batches" the ops of such a dataset.
    """

    reason: str
    match: dict[str, Any] = field(default_factory=dict)
    instead: dict[str, Any] = field(default_factory=dict)
    test: str = ""

    def applies(self, case: dict[str, Any]) -> bool:
        return not self.test and all(
            _fits(wanted, _field(case, path)) for path, wanted in self.match.items()
        )

    def expectation(self, case: dict[str, Any]) -> Any:
        """What the case must come to, encoded as in the recording."""
        (kind,) = self.instead
        expected = self.instead[kind]
        if kind == "error":
            return {"error": expected, "error_bases": [], "error_strict": True}
        if kind == "expect":
            return expected
        if kind == "computed":
            module = next(module for module in _COMPUTING if hasattr(module, expected))
            compute: Callable[[dict[str, Any]], Any] = getattr(module, expected)
            return compute(case)
        raise ValueError(f"instead must be error, expect or computed, not {kind!r}")


def _field(case: dict[str, Any], path: str) -> Any:
    value: Any = case
    for name in _SHORT.get(path, path).split("."):
        if isinstance(value, list) and name.isdecimal():
            value = value[int(name)] if int(name) < len(value) else _ABSENT
        else:
            value = value.get(name, _ABSENT) if isinstance(value, dict) else _ABSENT
    return value


def _fits(wanted: Any, value: Any) -> bool:
    if isinstance(wanted, list):
        return any(_fits_one(option, value) for option in wanted)
    return _fits_one(wanted, value)


def _fits_one(wanted: Any, value: Any) -> bool:
    if not isinstance(wanted, str):
        return type(value) is type(wanted) and bool(value == wanted)
    if wanted == "absent":
        return value is _ABSENT
    if wanted == "null":
        return value is None
    if wanted == "zeros":
        return value is not _ABSENT and value is not None and not np.any(value)
    if wanted == "batches of batches":
        return isinstance(value, list) and differing_input.depth_of_batches(value) > 1
    if wanted[0] in "<>" and isinstance(value, int):
        bound = int(wanted[1:])
        return value > bound if wanted[0] == ">" else value < bound
    if wanted.endswith("*"):
        return isinstance(value, str) and value.startswith(wanted[:-1])
    return bool(value == wanted)


def load() -> list[Difference]:
    rules = tomllib.loads(FILE.read_text())["difference"]
    return [Difference(**rule) for rule in rules]


def find(rules: list[Difference], case: dict[str, Any]) -> Difference | None:
    """The first rule that applies to `case`."""
    return next((rule for rule in rules if rule.applies(case)), None)
