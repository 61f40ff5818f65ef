"""Draws docstrings for the matching test of the package's prose: can a stranger tell which function each describes?

    cd tests; python -m support.matching FOLDER [--of ROOM ...]

The seed is the hash of the commit that is checked out, so a draw can be repeated. It draws 60 of the docstrings of at
least 20 words, in six sheets of ten. For each sheet it writes into FOLDER:

- `sheet-N-docstrings.txt`: ten docstrings, A to J, without examples;
- `sheet-N-bodies.txt`: their ten bodies in another order, 1 to 10, without docstrings and comments, and with names
  removed: each name that the body defines, and the function's own, becomes `n1`, `n2`, …;
- `sheet-N-code.txt`: the ten functions in the order of the docstrings, with names and without docstrings, for the
  person who writes a question about each;
- `sheet-N-key.txt`: the pairs.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.house import Module, modules, prose

WORDS = 20
SHEETS, PER_SHEET = 6, 10

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
    def __init__(self, numbers: dict[str, str]) -> None:
        self._numbers = numbers

    def visit(self, node: ast.AST) -> ast.AST:
        for field in ("id", "arg", "attr", "name"):
            if isinstance(name := getattr(node, field, None), str):
                setattr(node, field, self._numbers.get(name, name))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--of", nargs="+", default=[""], help="begins of modules' names")
    arguments = parser.parse_args()
    here = Path(__file__).parent
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=here, text=True).strip()
    drawn = random.Random(commit)
    some = [module for module in modules() if module.name.startswith(tuple(arguments.of))]
    chosen = drawn.sample(documented(some), SHEETS * PER_SHEET)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for sheet in range(SHEETS):
        entries = chosen[sheet * PER_SHEET : (sheet + 1) * PER_SHEET]
        order = drawn.sample(range(PER_SHEET), PER_SHEET)
        letters = "ABCDEFGHIJ"
        rule = "=" * 60
        files = {
            "docstrings": [f"{rule} {letters[i]}\n{e.docstring}\n" for i, e in enumerate(entries)],
            "bodies": [f"{rule} {k + 1}\n{entries[i].body()}\n" for k, i in enumerate(order)],
            "code": [f"{rule} {letters[i]} {e.place}\n{e.code}\n" for i, e in enumerate(entries)],
            "key": [
                f"{letters[i]} {order.index(i) + 1} {e.place}\n" for i, e in enumerate(entries)
            ],
        }
        for kind, parts in files.items():
            (arguments.folder / f"sheet-{sheet + 1}-{kind}.txt").write_text("\n".join(parts))
    print(f"{SHEETS * PER_SHEET} docstrings drawn by commit {commit}")


if __name__ == "__main__":
    main()
