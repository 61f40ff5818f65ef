"""Draws docstrings for the matching test of the package's prose: can a stranger tell which function each describes?

    cd tests; python -m support.matching FOLDER [--of ROOM ...]

The seed is the hash of the commit that is checked out, without changes, so a draw can be repeated. It draws 60 of the
docstrings of at least 20 words, in six sheets of ten. For each sheet it writes into FOLDER:

- `sheet-N-docstrings.txt`: ten docstrings, A to J, without examples;
- `sheet-N-bodies.txt`: their ten bodies in another order, 1 to 10, without docstrings, comments, annotations and
  texts, and with names removed: each name that the body defines, and the function's own, becomes `n1`, `n2`, …;
- `sheet-N-code.txt`: the ten functions in the order of the docstrings, with names and without docstrings, for the
  person who writes a question about each;
- `sheet-N-key.txt`: the pairs.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import string
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.house import PACKAGE, Module, modules, prose

WORDS = 20
SHEETS = 6
PER_SHEET = 10

_DOCUMENTED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Documented:
    """A class or a function with a docstring. `place` is its file, its line and its name."""

    place: str
    docstring: str
    code: str

    def body(self) -> str:
        """The code with its own names replaced by n1, n2, …"""
        tree = ast.parse(self.code)
        numbers: dict[str, str] = {}
        for name in _defined(tree):
            numbers.setdefault(name, f"n{len(numbers) + 1}")
        return ast.unparse(_Renamed(numbers).visit(tree))


def _defined(tree: ast.AST) -> Iterator[str]:
    """The names of functions, classes, arguments, variables and attributes that the code defines or calls on self."""
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED):
            yield node.name
        elif isinstance(node, ast.arg) and node.arg not in ("self", "cls"):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            yield node.attr


class _Renamed(ast.NodeTransformer):
    """Replaces names, leaves out annotations, and makes each text "…"."""

    def __init__(self, numbers: dict[str, str]) -> None:
        self._numbers = numbers

    def visit(self, node: ast.AST) -> ast.AST:
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text or isinstance(node, ast.JoinedStr):
            return ast.Constant("…")
        for field in ("id", "arg", "attr", "name"):
            if isinstance(name := getattr(node, field, None), str):
                setattr(node, field, self._numbers.get(name, name))
        if isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(...)
        for field in ("annotation", "returns"):
            if not isinstance(node, ast.AnnAssign) and hasattr(node, field):
                setattr(node, field, None)
        return super().visit(node)


class _Undocumented(ast.NodeTransformer):
    def visit(self, node: ast.AST) -> ast.AST:
        super().visit(node)
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return node


def documented(some: list[Module]) -> list[Documented]:
    """Those of the modules whose docstring has at least `WORDS` words; a class is shown with its methods."""
    found = []
    for module in some:
        for node in ast.walk(module.tree):
            if isinstance(node, _DOCUMENTED):
                docstring = prose(ast.get_docstring(node) or "").strip()
                if len(re.findall(r"[A-Za-z']+", docstring)) >= WORDS:
                    bare = _Undocumented().visit(ast.parse(ast.unparse(node)))
                    place = f"{module.name}:{node.lineno} {node.name}"
                    found.append(Documented(place, docstring, ast.unparse(bare)))
    return found


def sheets(seed: str, entries: list[Documented]) -> list[dict[str, str]]:
    """The texts of each sheet, by the last word of their files' names. Raises: ValueError for too few entries."""
    if len(entries) < SHEETS * PER_SHEET:
        raise ValueError(f"expected {SHEETS * PER_SHEET} docstrings or more, got {len(entries)}")
    drawn = random.Random(seed)
    chosen = drawn.sample(entries, SHEETS * PER_SHEET)
    firsts = range(0, len(chosen), PER_SHEET)
    return [_sheet(drawn, chosen[first : first + PER_SHEET]) for first in firsts]


def _sheet(drawn: random.Random, entries: list[Documented]) -> dict[str, str]:
    order = drawn.sample(range(PER_SHEET), PER_SHEET)  # of the bodies
    rule = "=" * 60
    docstrings: list[str] = []
    bodies: list[str] = []
    code: list[str] = []
    key: list[str] = []
    for at, entry in enumerate(entries):
        letter = string.ascii_uppercase[at]
        number = order.index(at) + 1
        docstrings.append(f"{rule} {letter}\n{entry.docstring}\n")
        code.append(f"{rule} {letter} {entry.place}\n{entry.code}\n")
        key.append(f"{letter} {number} {entry.place}\n")
    for number, at in enumerate(order, 1):
        body = entries[at].body()
        bodies.append(f"{rule} {number}\n{body}\n")
    parts = {"docstrings": docstrings, "bodies": bodies, "code": code, "key": key}
    return {kind: "\n".join(some) for kind, some in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--of", nargs="+", default=[""], help="begins of modules' names")
    arguments = parser.parse_args()
    if changed := _git("status", "--porcelain", str(PACKAGE)):
        parser.error(f"the seed is a commit: commit these changes first\n{changed}")
    commit = _git("rev-parse", "HEAD")
    rooms = tuple(arguments.of)
    some = [module for module in modules() if module.name.startswith(rooms)]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for number, texts in enumerate(sheets(commit, documented(some)), 1):
        for kind, text in texts.items():
            (arguments.folder / f"sheet-{number}-{kind}.txt").write_text(text, encoding="utf-8")
    print(f"{SHEETS * PER_SHEET} docstrings drawn by commit {commit}")


def _git(*words: str) -> str:
    return subprocess.check_output(["git", *words], cwd=PACKAGE, text=True).strip()


if __name__ == "__main__":
    main()
