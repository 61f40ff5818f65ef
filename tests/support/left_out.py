"""Every wait of the package that orders the work of a device, and the package without one of them.

Waits are found in the syntax tree: calls that make a stream or the host wait, that record what is waited for, and that
tell the allocator who uses memory. One is left out by giving the function around it code without it; the arguments are
evaluated still, and the result is a plausible one: an event that nobody has recorded, or True for "it has come".
"""

import ast
import functools
import importlib
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE = Path(__file__).parents[2] / "mpistrat"
# What torch, CuPy and our own `DeviceLibrary` call them.
WAITS = {"wait_event", "wait_stream", "synchronize", "block_current_stream", "wait"}
RECORDS = {"record_event", "record"}
LOOKS = {"query", "is_done", "done"}
NAMES = WAITS | RECORDS | LOOKS | {"record_stream"}
# Names that others use, too, count in files that have one of the rest.
OF_OTHERS = {"wait", "record", "done"}
STAND_IN = "_left_out"


class Site(NamedTuple):
    """`function`: around it, "Class.method", the outermost."""

    file: str
    line: int
    function: str
    name: str
    number: int  # of the function's, in the order of the tree
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.text}"


@functools.cache
def sites(elsewhere: frozenset[str] = frozenset()) -> tuple[Site, ...]:
    """Args: elsewhere: files and folders of the package that are left out."""
    found: list[Site] = []
    for file in sorted(PACKAGE.rglob("*.py")):
        place = str(file.relative_to(PACKAGE))
        if not place.startswith(tuple(elsewhere)):
            found += _sites_of(place, ast.parse(file.read_text(encoding="utf-8")))
    return tuple(found)


def _sites_of(place: str, tree: ast.Module) -> list[Site]:
    found = [
        Site(place, node.lineno, name, _attribute(node).attr, number, ast.unparse(node))
        for name, function in _functions(tree)
        for number, node in enumerate(_waits(function))
    ]
    return found if any(site.name not in OF_OTHERS for site in found) else []


def _functions(tree: ast.AST, around: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """The outermost ones, and those of classes."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield around + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{around}{node.name}.")
        else:
            yield from _functions(node, around)


def _waits(function: ast.FunctionDef) -> Iterator[ast.Call | ast.Attribute]:
    called = {id(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in NAMES and not isinstance(node.func.value, ast.Call | ast.Constant) or (
                node.func.attr in NAMES - OF_OTHERS
            ):
                yield node
        elif isinstance(node, ast.Attribute) and node.attr == "done" and id(node) not in called:
            yield node  # CuPy's events have it as a property
