"""What a file uses of another library, from its syntax tree.

Names are followed from the import through assignments, attributes and what a call returns, as far as `Library` knows
that. It is no type checker: what a function is handed is known by the parameter's annotation, or from `Library`.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

Names = Mapping[str, str]


@dataclass(frozen=True)
class Library:
    """What cannot be seen in our source.

    Attributes:
        modules: whose names are followed.
        values: the class of an attribute, or of what a call (written with parentheses) returns. A class that is called
            makes one of its own.
        names: by class or function of ours, what names inside it are.
    """

    modules: tuple[str, ...]
    values: Names
    names: Mapping[str, Names] = field(default_factory=dict)

    @property
    def roots(self) -> set[str]:
        of_values = {name.partition(".")[0] for name in self.values}
        return of_values.union(self.modules)


class Use(NamedTuple):
    """`call`: None where the name is not called."""

    name: str
    call: ast.Call | None
    line: int


def uses_in(library: Library, folder: Path) -> Iterator[tuple[str, Use]]:
    """Those of all files there, with their places."""
    words = re.compile("|".join({*library.roots, *library.names}))
    for file in sorted(folder.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if words.search(text):
            for use in uses_of(library, ast.parse(text)):
                yield f"{file.relative_to(folder)}:{use.line}", use


def uses_of(library: Library, tree: ast.Module) -> list[Use]:
    """Every name of the library that is taken, also in programs that stand in the file as text."""
    follower = _Follower(library)
    follower.visit(tree)  # what names are bound to
    follower.uses.clear()
    follower.visit(tree)  # now in whatever order they stand
    found = follower.uses
    for program in _programs(tree, library.modules):
        found += uses_of(library, program)
    return found


Scope = tuple[str, ...]  # names of classes and functions around a node


class _Follower(ast.NodeVisitor):
    def __init__(self, library: Library) -> None:
        self._library = library
        self._scope: Scope = ()
        self._bound: dict[tuple[Scope, str], str] = {}  # by scope and text
        self.uses: list[Use] = []

    # What names are bound to

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            root = alias.name.partition(".")[0]
            if alias.asname:
                self._bind(ast.Name(alias.asname), alias.name)
            else:
                self._bind(ast.Name(root), root)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            name = f"{node.module}.{alias.name}"
            if self._bind(ast.Name(alias.asname or alias.name), name):
                self.uses.append(Use(name, None, node.lineno))

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for each, value in zip(target.elts, node.value.elts, strict=False):
                    self._bind(each, self._name_of(value))
            else:
                self._bind(target, self._name_of(node.value))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._within(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._within(node)

    def visit_Return(self, node: ast.Return) -> None:
        self.generic_visit(node)
        if node.value is not None and (name := self._name_of(node.value)):
            call = f"self.{self._scope[-1]}()"
            self._bound[self._scope[:1], call] = name

    def _within(self, node: ast.ClassDef | ast.FunctionDef) -> None:
        outside = self._scope
        self._scope = (*outside, node.name)
        for name, meant in self._library.names.get(node.name, {}).items():
            self._bind(ast.Name(name), meant)
        if isinstance(node, ast.FunctionDef):
            for argument in (*node.args.args, *node.args.kwonlyargs):
                if argument.annotation:
                    self._bind(ast.Name(argument.arg), ast.unparse(argument.annotation))
        self.generic_visit(node)
        self._scope = outside

    def _bind(self, target: ast.expr, name: str | None) -> bool:
        if name is None or name.partition(".")[0] not in self._library.roots:
            return False
        text = _text(target)
        scope = self._scope
        if text.startswith("self."):
            scope = scope[:1]
        self._bound[scope, text] = name
        return True

    # What is used

    def visit_Call(self, node: ast.Call) -> None:
        name = self._name_of(node.func)
        if name is None:
            self.generic_visit(node)
            return
        self.uses.append(Use(name, node, node.lineno))
        for part in ast.iter_child_nodes(node.func):
            self.visit(part)
        for argument in (*node.args, *node.keywords):
            self.visit(argument)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        outer = self._name_of(node.value)
        if outer:
            name = f"{outer}.{node.attr}"
            self.uses.append(Use(name, None, node.lineno))
        self.generic_visit(node)

    def _name_of(self, node: ast.expr) -> str | None:
        """The name in the library of what an expression is, or of the class that it is one of; None: neither."""
        match node:
            case ast.Subscript(
                ast.Attribute(ast.Name("sys"), "modules"), ast.Constant(module)
            ) | ast.Call(
                ast.Attribute(ast.Attribute(ast.Name("sys"), "modules"), "get"),
                [ast.Constant(module)],
            ) if module in self._library.modules:
                return module
            case ast.IfExp(_, body, orelse):
                return self._name_of(body) or self._name_of(orelse)
            case ast.Call(function):
                return self._returned(function)
            case ast.Name() | ast.Subscript():
                return self._looked_up(_text(node))
            case ast.Attribute(value, attribute):
                outer = self._name_of(value)
                if outer:
                    name = f"{outer}.{attribute}"
                    return self._library.values.get(name, name)
                return self._looked_up(_text(node))
        return None

    def _looked_up(self, text: str) -> str | None:
        """In the innermost scope that binds `text`."""
        for end in range(len(self._scope), -1, -1):
            name = self._bound.get((self._scope[:end], text))
            if name is not None:
                return name
        return None

    def _returned(self, function: ast.expr) -> str | None:
        name = self._name_of(function)
        if name is None:
            return self._looked_up(f"{_text(function)}()")
        last = name.rpartition(".")[2]
        is_class = last[:1].isupper() or last == "ndarray"
        return self._library.values.get(f"{name}()", name if is_class else None)


def _text(node: ast.expr) -> str:
    """`self._streams[]` for an item by whatever key; "" of what is no name."""
    match node:
        case ast.Name(name):
            return name
        case ast.Attribute(value, attribute):
            return f"{_text(value)}.{attribute}"
        case ast.Subscript(value, key):
            item = repr(key.value) if isinstance(key, ast.Constant) else ""
            return f"{_text(value)}[{item}]"
    return ""


def _programs(tree: ast.Module, modules: tuple[str, ...]) -> Iterator[ast.Module]:
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = ""
            for part in node.values:
                text += str(part.value) if isinstance(part, ast.Constant) else "0"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if any(f"import {module}" in text for module in modules):
            try:
                yield ast.parse(text)
            except SyntaxError:
                continue  # prose
