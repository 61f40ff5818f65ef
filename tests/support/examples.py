"""The examples in the docstrings of the public names: the reference in docs/api shows them, and tests run them."""

from __future__ import annotations

import ast
import doctest
import functools
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
NEEDS = ("several ranks", "several nodes", "a TPU", "Slurm", "Kubernetes", "Google Cloud")

_DIRECTIVE = re.compile(
    r"^\.\. (currentmodule|autoclass|autofunction|automodule):: (\S+)"
    r"(?:\n   (:inherited-members:) *(.*))?",
    re.M,
)
_EXAMPLE = re.compile(r"^( *)Example(?:, (?:on|with|under) (.*?))?:(:?)\n((?:\1 +.*\n|\n)+)", re.M)


@dataclass(frozen=True)
class PublicName:
    """A class or a function that the reference describes.

    Attributes:
        path: its module and its name: "mpistrat.Strategy".
        inherits: whether the page shows the members of its bases with it.
        until: names of the first bases whose members it does not show.
    """

    path: str
    thing: Any
    inherits: bool = False
    until: tuple[str, ...] = ()

    def members(self) -> dict[str, str]:
        """The docstrings of the public methods and properties that the page shows here, by name; none of a function.

        An override has the docstring of the method that it overrides if it has none of its own.
        """
        if not inspect.isclass(self.thing):
            return {}
        owners = [self.thing]
        if self.inherits:
            bases = self.thing.__mro__
            names = [base.__name__ for base in bases]
            ends = [names.index(name) for name in self.until]
            shown = bases[: min(ends, default=len(bases))]
            owners += [base for base in self.hidden_bases() if base in shown]
        attributes = re.findall(r"^(?:Attributes:| ) *([\w, ]+):", self.docstring(), re.M)
        described = {name for entry in attributes for name in entry.split(", ")}
        docstrings = {}
        for name in [name for owner in owners for name in _members(owner)]:
            docstring = _docstring_of(self.thing, name)
            if docstring or name not in described:
                docstrings[name] = docstring
        return docstrings

    def hidden_bases(self) -> list[type]:
        """The package's classes among its bases that have no entry of their own."""
        described = {name.thing for name in public_names()}
        bases = self.thing.__mro__[1:] if inspect.isclass(self.thing) else ()
        return [b for b in bases if b.__module__.startswith("mpistrat.") and b not in described]

    def docstring(self) -> str:
        return inspect.cleandoc(self.thing.__doc__ or "")

    def examples(self) -> list[Example]:
        """The examples of the docstring and of the members' docstrings."""
        docstrings = (self.docstring(), *self.members().values())
        return [example for docstring in docstrings for example in examples_of(docstring)]


def _members(owner: type) -> Iterator[str]:
    for name, member in vars(owner).items():
        inner = _inner(member)
        is_shown = inspect.isroutine(inner) or isinstance(inner, property)
        if is_shown and not name.startswith("_"):
            yield name


def _inner(member: Any) -> Any:
    """The function of a class method, a static method or a cached property."""
    return getattr(member, "__func__", getattr(member, "func", member))


def _docstring_of(owner: type, name: str) -> str:
    """That of the first class in the order of resolution whose attribute has one."""
    for base in owner.__mro__:
        if name not in vars(base):
            continue
        inner = _inner(vars(base)[name])
        if docstring := getattr(inner, "__doc__", None):
            return inspect.cleandoc(docstring)
    return ""


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
        """The attributes that it uses: methods and properties."""
        nodes = list(ast.walk(ast.parse(self.program())))
        return {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def examples_of(docstring: str) -> list[Example]:
    found = []
    for _, needs, colon, block in _EXAMPLE.findall(docstring + "\n"):
        code = textwrap.dedent(block).strip("\n") + "\n"
        found.append(Example(code, needs or "", runs=not colon))
    return found


@functools.cache
def public_names() -> tuple[PublicName, ...]:
    """The names on all pages of the reference."""
    found = {}
    for page in sorted(REFERENCE.glob("*.md")):
        for name in _described(page.read_text(encoding="utf-8")):
            found[name.path] = name
    return tuple(found.values())


def _described(page: str) -> Iterator[PublicName]:
    module = "mpistrat"
    for directive, target, inherits, until in _DIRECTIVE.findall(page):
        if directive == "currentmodule":
            module = target
        elif directive == "automodule":
            whole = importlib.import_module(target)
            for name in whole.__all__:
                yield PublicName(f"{target}.{name}", getattr(whole, name))
        else:
            path = target if target.startswith("mpistrat.") else f"{module}.{target}"
            owner, _, name = path.rpartition(".")
            thing = getattr(importlib.import_module(owner), name)
            yield PublicName(path, thing, bool(inherits), tuple(re.findall(r"\w+", until)))
