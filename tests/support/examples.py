"""The examples in the docstrings of the public names: the reference in docs/api shows them, and tests run them."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REFERENCE = Path(__file__).parents[2] / "docs/api"
# What an example may need that one rank on a CPU lacks. Such an example is shown and does not run.
NEEDS = ("several ranks", "several nodes", "GPUs", "NCCL", "a TPU", "Slurm", "Kubernetes")

_DIRECTIVE = re.compile(r"^\.\. (currentmodule|autoclass|autofunction|automodule):: (\S+)", re.M)
_EXAMPLE = re.compile(r"^( *)Example(?:, (?:on|with|under) (.*?))?:(:?)\n((?:\1 +.*\n|\n)+)", re.M)


@dataclass(frozen=True)
class PublicName:
    """A class or a function that the reference describes. `path` is its module and its name: `mpistrat.Strategy`."""

    path: str
    thing: Any

    def members(self) -> dict[str, str]:
        """The docstring of each public method and property of the class's own, by name; none of a function."""
        if not inspect.isclass(self.thing):
            return {}
        found = {}
        for name, member in vars(self.thing).items():
            inner = getattr(member, "__func__", getattr(member, "func", member))
            if not name.startswith("_") and (docstring := inspect.getdoc(inner)):
                if inspect.isroutine(inner) or isinstance(inner, property):
                    found[name] = docstring
        return found

    def docstring(self) -> str:
        return inspect.cleandoc(self.thing.__doc__ or "")

    def examples(self) -> list[Example]:
        """Those of the docstring and of the members' docstrings."""
        return [
            example
            for docstring in (self.docstring(), *self.members().values())
            for example in examples_of(docstring)
        ]


@dataclass(frozen=True)
class Example:
    """An example of a docstring.

    Attributes:
        code: its lines, without indentation; with `>>>` where it runs.
        needs: an entry of `NEEDS` for an example that does not run, else "".
        runs: whether it is a doctest.
    """

    code: str
    needs: str
    runs: bool

    def program(self) -> str:
        """The Python of it."""
        if not self.runs:
            return self.code
        return "".join(part.source for part in doctest.DocTestParser().get_examples(self.code))

    def names(self) -> set[str]:
        """The names and the attributes that it uses."""
        nodes = list(ast.walk(ast.parse(self.program())))
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        return names | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def examples_of(docstring: str) -> list[Example]:
    return [
        Example(textwrap.dedent(block).strip("\n") + "\n", needs or "", runs=not colon)
        for _, needs, colon, block in _EXAMPLE.findall(docstring + "\n")
    ]


def public_names() -> list[PublicName]:
    """Those of all pages of the reference."""
    found = {}
    for page in sorted(REFERENCE.glob("*.md")):
        for name in _described(page.read_text(encoding="utf-8")):
            found[name.path] = name
    return list(found.values())


def _described(page: str) -> Iterator[PublicName]:
    module = "mpistrat"
    for directive, target in _DIRECTIVE.findall(page):
        if directive == "currentmodule":
            module = target
        elif directive == "automodule":
            whole = importlib.import_module(target)
            for name in whole.__all__:
                yield PublicName(f"{target}.{name}", getattr(whole, name))
        else:
            path = target if target.startswith("mpistrat.") else f"{module}.{target}"
            owner, _, name = path.rpartition(".")
            yield PublicName(path, getattr(importlib.import_module(owner), name))
