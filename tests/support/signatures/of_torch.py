"""What the package uses of torch's process groups and stores, and what torch says that they take.

A torch for CPUs has neither NCCL's nor XCCL's class. Its `.pyi` describes their constructors, options and own methods.
What both inherit is `Backend`'s, whose collectives the `.pyi` leaves out; that class is there, and its docstrings show
them.
"""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import torch
from torch._C import _distributed_c10d as c10d

from mpistrat.torch_distributed import process_group
from support.signatures import parsing
from support.signatures.of_cupy import PACKAGE
from support.signatures.uses import Library, Use, uses_in

NATIVE = ("ProcessGroupNCCL", "ProcessGroupXCCL")
MODULES = (
    "torch._C._distributed_c10d.",
    "torch.distributed.distributed_c10d.",
    "torch.distributed.",
)

LIBRARY = Library(
    modules=("torch",),
    values={
        "NativeGroups.of()": "NativeGroup",  # either of NATIVE
        "NativeGroup.allreduce()": "torch.distributed.Work",
        "NativeGroup.broadcast()": "torch.distributed.Work",
    },
    names={
        "NativeGroups": {"group": "NativeGroup"},
        "NativeTransport": {"group": "NativeGroup"},
        "make_group": {"cls": "NativeGroup"},
        "MpistratProcessGroup": {"self._native": "NativeGroups"},
        "GroupCollective": {"group": "NativeGroup"},
    },
)

Signatures = list[inspect.Signature]


def uses() -> Iterator[tuple[str, Use]]:
    """Those of a class that the `.pyi` describes, by the name that it has there, with the place of each."""
    for place, use in uses_in(LIBRARY, PACKAGE):
        module = _module_of(use.name)
        name = use.name.removeprefix(module)
        outer = name.partition(".")[0]
        if outer == "Backend" and module != MODULES[0]:
            continue  # torch's registry, in Python, has the same name
        if outer == "NativeGroup" or (module and outer in STUB):
            yield place, use._replace(name=name)
    yield from _collectives()


def _module_of(name: str) -> str:
    """The first of `MODULES` that `name` begins with; "" if none."""
    for module in MODULES:
        if name.startswith(module):
            return module
    return ""


def _collectives() -> Iterator[tuple[str, Use]]:
    """Of the table of collectives: the method of torch's own groups, with the operands and the options."""
    for name, collective in vars(process_group).items():
        if isinstance(collective, process_group.GroupCollective):
            parameters = inspect.signature(collective.make).parameters
            operands = len(parameters) - len(collective.fields) - 1  # `make` takes `self`, too
            arguments = ", ".join(["operand"] * operands + ["opts"])
            call = ast.parse(f"group.{collective.native}({arguments})", mode="eval").body
            assert isinstance(call, ast.Call)
            yield name, Use(f"NativeGroup.{collective.native}", call, 0)


def signatures(name: str) -> Iterator[Signatures]:
    """What `name` takes, one for each overload; of both native groups if it is theirs. Raises: KeyError: no such."""
    outer, _, rest = name.partition(".")
    classes = NATIVE if outer == "NativeGroup" else (outer,)
    for each in classes:
        yield _signatures(f"{each}.{rest}" if rest else each)


def _signatures(name: str) -> Signatures:
    if name in STUB:
        return STUB[name].get("__init__", [inspect.Signature()])
    outer, _, member = name.rpartition(".")
    known = STUB[outer]
    if outer in NATIVE and member not in known:
        if not hasattr(c10d.Backend, member):
            raise KeyError(name)
        return parsing.of_docstring(getattr(c10d.Backend, member).__doc__, member)
    return known[member]


def _classes(body: list[ast.stmt], around: str = "") -> Iterator[tuple[str, ast.ClassDef]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield around + node.name, node
            yield from _classes(node.body, f"{around}{node.name}.")


def _read_stub() -> dict[str, dict[str, Signatures]]:
    """By class, with those inside others, what it and the classes before it define; no signature for attributes.

    `Backend`'s members are left out: some of those in the `.pyi` are missing in the class.
    """
    file = Path(torch.__file__).parent / "_C/_distributed_c10d.pyi"
    stub: dict[str, dict[str, Signatures]] = {}
    for name, node in _classes(ast.parse(file.read_text(encoding="utf-8")).body):
        members: dict[str, Signatures] = {}
        for statement in node.body:
            match statement:
                case ast.FunctionDef(decorator_list=[*_, ast.Name("property")]):
                    members[statement.name] = []
                case ast.FunctionDef(decorator_list=[ast.Attribute(attr="setter")]):
                    pass
                case ast.FunctionDef():
                    members.setdefault(statement.name, []).append(parsing.of_stub(statement))
                case ast.AnnAssign(target=ast.Name(attribute)):
                    members[attribute] = []
                case ast.Assign(targets=[ast.Name(attribute)]):
                    members[attribute] = []
        everything: dict[str, Signatures] = {}
        for base in node.bases:
            base_name = ast.unparse(base)
            if base_name != "Backend":
                everything.update(stub.get(base_name, {}))
        stub[name] = everything | members
    return stub


STUB = _read_stub()
