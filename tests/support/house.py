"""Counts the structure and the prose of the package, for `tests/unit/test_house.py`.

Run as a program it prints the counts by room: `python tests/support/house.py`.
"""

from __future__ import annotations

import ast
import collections
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "mpistrat"
RELATIVES = {"what", "which", "whose", "those", "whom"}
LARGE = 15  # methods of a class

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DOCUMENTED = (ast.Module, ast.ClassDef, *_FUNCTIONS)
_DECISIONS = (
    *(ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler, ast.Assert),
    *(ast.match_case, ast.Lambda),
)
_LOOPS_BY_NAME = {"any", "all", "filter", "map"}
_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


@dataclass
class Module:
    """A module of the package. `name` is its path below the package."""

    name: str
    source: str
    tree: ast.Module

    @property
    def room(self) -> str:
        return self.name.partition("/")[0]


def modules() -> list[Module]:
    """All modules of the package, by name."""
    texts = {p.relative_to(PACKAGE).as_posix(): p.read_text() for p in PACKAGE.rglob("*.py")}
    return [Module(name, text, ast.parse(text)) for name, text in sorted(texts.items())]


def code_lines(module: Module) -> int:
    """Lines without docstrings, comments and blank lines."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(module.source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for docstring in _docstrings(module.tree):
        lines -= {*range(docstring.lineno, (docstring.end_lineno or 0) + 1)}
    return len(lines)


def _docstrings(tree: ast.Module) -> Iterator[ast.stmt]:
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            yield node.body[0]


def branches(tree: ast.AST) -> int:
    """Conditions, joined ones, loops, handlers, cases, asserts, lambdas, comprehensions, any, all, filter, map."""
    count = 0
    for node in ast.walk(tree):
        count += isinstance(node, _DECISIONS)
        if isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            count += node.func.id in _LOOPS_BY_NAME
    return count


def hard_functions(module: Module, more_than: int) -> dict[str, int]:
    """The functions of more than so many branches, those of inner functions included."""
    return {
        f"{module.name}:{node.name}": count
        for node in ast.walk(module.tree)
        if isinstance(node, _FUNCTIONS) and (count := branches(node)) > more_than
    }


def large_classes(module: Module) -> dict[str, int]:
    """The classes of more than `LARGE` methods."""
    return {
        f"{module.name}:{node.name}": methods
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
        and (methods := sum(isinstance(part, _FUNCTIONS) for part in node.body)) > LARGE
    }


def names_that_stand_twice(all_modules: list[Module]) -> dict[str, list[str]]:
    """Class names of several modules. `compat` has TensorFlow's; an underscore in front makes no other name."""
    found: dict[str, set[str]] = collections.defaultdict(set)
    for module in all_modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and module.room != "compat":
                found[node.name.lstrip("_")].add(module.name)
    return {name: sorted(places) for name, places in found.items() if len(places) > 1}


def words(module: Module) -> list[str]:
    """Of docstrings and comments, in lower case, without examples."""
    texts = [
        prose(ast.get_docstring(node) or "")
        for node in ast.walk(module.tree)
        if isinstance(node, _DOCUMENTED)
    ]
    for token in tokenize.generate_tokens(io.StringIO(module.source).readline):
        if token.type == tokenize.COMMENT:
            texts.append(token.string.lstrip("# "))
    return re.findall(r"[a-z']+", " ".join(texts).lower())


def prose(docstring: str) -> str:
    """Without the lines of `>>>` and the lines that they print, and without blocks that are indented after `::`."""
    kept: list[str] = []
    is_example, block = False, 0
    for line in docstring.splitlines():
        bare, indent = line.strip(), len(line) - len(line.lstrip())
        if block and (not bare or indent >= block):
            continue
        is_example = bare.startswith(">>>") or (is_example and bool(bare))
        if not is_example:
            kept.append(line)
        block = indent + 1 if bare.endswith("::") else 0
    return "\n".join(kept)


@dataclass
class Counts:
    """What is counted of some modules.

    Attributes:
        branches: per 100 code lines.
        over_10, over_14: functions of more branches.
        relatives: per 1,000 words.
        large: classes.
    """

    code: int
    branches: float
    over_10: int
    over_14: int
    relatives: float
    large: int


def counts(some: list[Module]) -> Counts:
    code = sum(code_lines(module) for module in some)
    all_words = [word for module in some for word in words(module)]
    return Counts(
        code,
        round(100 * sum(branches(module.tree) for module in some) / max(1, code), 1),
        sum(len(hard_functions(module, 10)) for module in some),
        sum(len(hard_functions(module, 14)) for module in some),
        round(1000 * sum(word in RELATIVES for word in all_words) / max(1, len(all_words)), 1),
        sum(len(large_classes(module)) for module in some),
    )


def main() -> None:
    everything = modules()
    rooms: dict[str, list[Module]] = collections.defaultdict(list)
    for module in everything:
        rooms[module.room].append(module)
    for room, some in sorted(rooms.items(), key=lambda entry: counts(entry[1]).code):
        print(f"{room:20}", counts(some))
    print(f"{'(all)':20}", counts(everything))


if __name__ == "__main__":
    main()
