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
OWN = {"wait_for_current_stream", "wait_until_idle"}
RECORDS = {"record_event", "record"}
QUERIES = {"query", "is_done", "done"}
NAMES = WAITS | OWN | RECORDS | QUERIES | {"record_stream"}
# Names that others use, too, count in files that have one of the rest.
OF_OTHERS = {"wait", "record", "done", "wait_until_idle"}
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


# XLA's devices have no streams; the other is a program of its own, in which nothing else runs.
ELSEWHERE = ("xla/", "communicators/transports/accelerator/device_memory_trial.py")
# By file and name, those that order nothing on a device.
_ACCELERATOR = "communicators/transports/accelerator"
OTHERS = {
    (f"{_ACCELERATOR}/pending_calls.py", "wait"): "for another thread of the host",
    (
        f"{_ACCELERATOR}/native.py",
        "wait_until_idle",
    ): "at the end, when the group's own shutdown waits, too",
}


def sites() -> list[Site]:
    """All of the package."""
    found: list[Site] = []
    for file in sorted(PACKAGE.rglob("*.py")):
        place = str(file.relative_to(PACKAGE))
        if not place.startswith(ELSEWHERE):
            found += _sites_of(place, ast.parse(file.read_text(encoding="utf-8")))
    return [site for site in found if (site.file, site.name) not in OTHERS]


@contextmanager
def without(site: Site, unrecorded: Callable[[Any], Any]) -> Iterator[None]:
    """The package as if the source had no such wait. Args: unrecorded: an event of a stream, or of a library."""
    module_name = site.file.removesuffix(".py").replace("/", ".")
    module = importlib.import_module(f"mpistrat.{module_name}")
    *around, name = site.function.split(".")
    function: Any = inspect.getattr_static(functools.reduce(getattr, around, module), name)
    function = inspect.unwrap(getattr(function, "__func__", function))

    def stand_in(what: str, receiver: Any, *_: Any, **__: Any) -> Any:
        if what in RECORDS:
            return unrecorded(receiver)
        return what in QUERIES or None

    before = function.__code__
    function.__code__ = _code_without(site)
    vars(module)[STAND_IN] = stand_in
    try:
        yield
    finally:
        function.__code__ = before


def _code_without(site: Site) -> types.CodeType:
    tree = ast.parse((PACKAGE / site.file).read_text(encoding="utf-8"))
    function = dict(_functions(tree))[site.function]
    _LeaveOut(list(_waits(function))[site.number]).visit(function)
    code = compile(ast.fix_missing_locations(tree), site.file, "exec")
    for name in site.function.split("."):
        parts = [part for part in code.co_consts if isinstance(part, types.CodeType)]
        code = next(part for part in parts if part.co_name == name)
    return code


class _LeaveOut(ast.NodeTransformer):
    def __init__(self, wait: ast.Call | ast.Attribute) -> None:
        self._wait = wait

    def visit(self, node: ast.AST) -> ast.AST:
        if node is not self._wait:
            return self.generic_visit(node)
        attribute = node.func if isinstance(node, ast.Call) else node
        assert isinstance(attribute, ast.Attribute)
        arguments = node.args if isinstance(node, ast.Call) else []
        operands = [ast.Constant(attribute.attr), attribute.value, *arguments]
        return ast.Call(ast.Name(STAND_IN, ast.Load()), operands, [])


def _sites_of(place: str, tree: ast.Module) -> list[Site]:
    found = [
        Site(place, node.lineno, name, _name(node), number, ast.unparse(node))
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
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    called = {call.func for call in calls}
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in NAMES:
                yield node
        elif isinstance(node, ast.Attribute) and node.attr == "done" and node not in called:
            yield node  # CuPy's events have it as a property


def _name(node: ast.Call | ast.Attribute) -> str:
    attribute = node.func if isinstance(node, ast.Call) else node
    assert isinstance(attribute, ast.Attribute)
    return attribute.attr
