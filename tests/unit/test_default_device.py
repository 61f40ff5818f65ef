"""Tensors of the package's own are made on a device that the call names, whatever `torch.set_default_device` says.

torch's factories are the functions that a default device changes: the package names none without `device=`, neither in
a call nor as a value. A method, such as `tensor.new_empty`, is on the tensor's own device.
"""

import ast
import re
from pathlib import Path

import torch
from torch.utils._device import _device_constructors

from mpistrat.input.prefetch import Prefetcher

ROOT = Path(__file__).parents[2]
PACKAGE = [*sorted((ROOT / "mpistrat").rglob("*.py")), ROOT / "mpistrat_torch.py"]

FACTORIES = {function.__name__.removeprefix("fft_") for function in _device_constructors()}

NAMED = re.compile(rf"\b(?:{'|'.join(FACTORIES)})\b")

REFUSED = (
    "torch.empty(3)",
    "torch.empty(3, device=None)",
    "torch.empty(3, device=None if like is None else like.device)",
    "torch.empty(3, **options)",
    "torch.fft.rfftfreq(3)",
    "f(torch.tensor([1]), device='cpu')",
    "torch.zeros(torch.tensor(3), device='cpu')",
    "self._torch.full((), 1)",
    "import torch as t; t.ones(3)",
    "import torch.nested as n; n.nested_tensor([])",
    "from torch import nested as n; n.nested_tensor([])",
    "from torch import empty; empty(3)",
    "from torch import as_tensor as made; made(3)",
    "sys.modules['torch'].arange(3)",
    "sys.modules.get('torch').arange(3)",
    "importlib.import_module('torch').arange(3)",
    "getattr(torch, 'eye')(3)",
    "xp.zeros(3)",
    "api.array_namespace(like).zeros(3)",
    "functools.partial(torch.empty, 3)",
    "map(torch.as_tensor, arrays)",
    "make = torch.as_tensor",
    "def f(make=torch.zeros): pass",
    "[torch.linspace for _ in x]",
)
NOT_REFUSED = (
    "torch.empty(3, device='cpu')",
    "torch.as_tensor(values, device=like.device)",
    "torch.empty(3, device=like.device if like else 'cpu')",
    "functools.partial(torch.empty, device='cpu')",
    "getattr(torch, 'eye')(3, device='cpu')",
    "tensor.new_empty(3)",
    "torch.empty_like(tensor)",
    "torch.from_numpy(array)",
    "torch.Generator()",
    "np.zeros(3)",
    "queue.empty()",
    "from torch import empty_like; empty_like(tensor)",
)


class _Factories(ast.NodeVisitor):
    """The uses of factories without a device, as (line, source)."""

    def __init__(self, tree: ast.Module) -> None:
        self.found: list[tuple[int, str]] = []
        self._modules, self._factories = {"torch", "xp"}, set[str]()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                self._modules |= {a.asname for a in node.names if a.asname and is_torch(a.name)}
            elif isinstance(node, ast.ImportFrom) and is_torch(node.module or ""):
                names = {alias.asname or alias.name: alias.name for alias in node.names}
                self._factories |= {own for own, name in names.items() if name in FACTORIES}
                self._modules |= {own for own, name in names.items() if name in ("fft", "nested")}
        self.visit(tree)

    def visit_Call(self, node: ast.Call) -> None:
        named = [keyword for keyword in node.keywords if keyword.arg == "device"]
        on_device = bool(named) and not _may_be_none(named[0].value)
        is_partial = _name(node.func) == "partial" and bool(node.args)
        function = node.args[0] if is_partial else node.func
        if not self._is_factory(function):
            self.generic_visit(node)
            return
        if not on_device:
            self.found.append((node.lineno, ast.unparse(node)))
        for part in (*node.args[is_partial:], *node.keywords):
            self.visit(part)

    def generic_visit(self, node: ast.AST) -> None:
        if self._is_factory(node):
            self.found.append((node.lineno, ast.unparse(node)))  # type: ignore[attr-defined]
        super().generic_visit(node)

    def _is_factory(self, node: ast.AST) -> bool:
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                return name in self._factories
            case ast.Attribute(value=module, attr=name):
                return name in FACTORIES and self._is_torch(module)
            case ast.Call(func=ast.Name(id="getattr"), args=[module, ast.Constant(value=name), *_]):
                return name in FACTORIES and self._is_torch(module)
        return False

    def _is_torch(self, node: ast.AST) -> bool:
        """Whether `node` is torch, by the name of what has it, or another module of torch's or of the array API."""
        match node:
            case ast.Name(id=name):
                return name.strip("_") in self._modules
            case ast.Attribute(value=module, attr=name):
                return name.strip("_") == "torch" or self._is_torch(module)
            case ast.Subscript(slice=ast.Constant(value=name)):  # sys.modules["torch"]
                return is_torch(name)
            case ast.Call(args=[ast.Constant(value=name), *_]):  # sys.modules.get("torch")
                return is_torch(name)
            case ast.Call(func=function):
                return _name(function) == "array_namespace"
        return False


def _name(node: ast.expr) -> str:
    """The last part of a dotted name."""
    return getattr(node, "attr", "") or getattr(node, "id", "")


def _may_be_none(node: ast.expr) -> bool:
    return any(isinstance(part, ast.Constant) and part.value is None for part in ast.walk(node))


def is_torch(name: object) -> bool:
    return isinstance(name, str) and name.partition(".")[0] == "torch"


def without_device(source: str) -> list[tuple[int, str]]:
    return _Factories(ast.parse(source)).found if NAMED.search(source) else []


def test_every_factory_is_told_its_device() -> None:
    assert not [
        f"{path.relative_to(ROOT)}:{line}: {source}"
        for path in PACKAGE
        for line, source in without_device(path.read_text())
    ]


def test_the_factories_are_those_that_a_default_device_changes() -> None:
    assert {"empty", "zeros", "tensor", "as_tensor", "randperm", "fftfreq"} <= FACTORIES
    assert len(FACTORIES) == len(_device_constructors()) >= 36


def test_what_is_refused() -> None:
    assert not [source for source in REFUSED if len(without_device(source)) != 1]


def test_what_is_not_refused() -> None:
    assert not [source for source in NOT_REFUSED if without_device(source)]


def test_what_is_read_ahead_is_on_the_host_beside_xla() -> None:
    """The reading thread would record into the graph of the step that the program's thread records."""
    with torch.device("xla:0"):
        ahead = Prefetcher((torch.empty(0).device.type for _ in "a"), 1)
    assert [*ahead] == ["cpu"]
