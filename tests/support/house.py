"""Counts the structure and the prose of the package, for `tests/unit/test_house.py`.

Run as a program it prints the counts by room: `python tests/support/house.py`.
"""

from __future__ import annotations

import ast
import collections
import functools
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
_STATEMENTS = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.Assert)
_DECISIONS = (*_STATEMENTS, ast.match_case, ast.IfExp, ast.Lambda)
_LOOPS_BY_NAME = {"any", "all", "filter", "map"}
_PACKED = 25  # a line with more nodes says several things
# Forms that put several statements, or a loop, on one line; `_form_of` says how each is recognised.
FORMS = ("parallel", "conditional", "map", "borrowed", "starred", "text_times_condition")
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


@dataclass(eq=False)  # each is itself, so that its words can be kept
class Module:
    """A module of the package. `name` is its path below the package."""

    name: str
    source: str
    tree: ast.Module

    @property
    def room(self) -> str:
        return self.name.partition("/")[0]


@functools.cache
def modules() -> list[Module]:
    """All modules of the package, by name."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        name = path.relative_to(PACKAGE).as_posix()
        found.append(Module(name, text, ast.parse(text)))
    return sorted(found, key=lambda module: module.name)


def code_lines(module: Module) -> int:
    """Lines without docstrings, comments and blank lines."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(module.source).readline):
        if token.type not in _NO_CODE:
            first = token.start[0]
            last = token.end[0]
            lines.update(range(first, last + 1))
    for docstring in _docstrings(module.tree):
        lines.difference_update(_lines_of(docstring))
    return len(lines)


def _lines_of(statement: ast.stmt) -> range:
    return range(statement.lineno, (statement.end_lineno or 0) + 1)


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


def nodes(module: Module) -> int:
    """The nodes of the syntax tree: they stay when code is only written on more or fewer lines."""
    return sum(1 for _ in ast.walk(module.tree))


def packed_lines(module: Module) -> list[int]:
    """The lines with more than `_PACKED` nodes, without docstrings, imports and headers of functions."""
    exempt = _headers(module.tree)
    for docstring in _docstrings(module.tree):
        exempt.update(_lines_of(docstring))
    counts = _nodes_of_lines(module.tree)
    packed = {line for line, count in counts.items() if count > _PACKED}
    return sorted(packed - exempt)


def _headers(tree: ast.Module) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            lines.update(_lines_of(node))
        elif isinstance(node, _FUNCTIONS):
            lines.update(range(node.lineno, node.body[0].lineno))
    return lines


_Waiting = tuple[ast.AST, int, bool]  # a node, its parent's line, whether it is in an f-string


def _nodes_of_lines(tree: ast.Module) -> collections.Counter[int]:
    """The number of nodes of each line. A node without a line is counted where its parent stands.

    The nodes inside an f-string are counted where the f-string begins: Python before 3.12 knows no lines of them.
    """
    counts: collections.Counter[int] = collections.Counter()
    waiting: list[_Waiting] = [(tree, 1, False)]
    while waiting:
        node, line, in_text = waiting.pop()
        if not in_text:
            line = getattr(node, "lineno", line)
        counts[line] += 1
        inside = in_text or isinstance(node, ast.JoinedStr)
        for child in ast.iter_child_nodes(node):
            waiting.append((child, line, inside))
    return counts


def packed_forms(module: Module) -> collections.Counter[str]:
    """How often each of `FORMS` stands in a module."""
    borrowed = _borrowed_names(module.tree)
    forms = [_form_of(node, borrowed) for node in ast.walk(module.tree)]
    return collections.Counter({form: forms.count(form) for form in FORMS})


def _borrowed_names(tree: ast.Module) -> set[str]:
    """The names that a module imports from operator and itertools, and partial."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                is_partial = (node.module, alias.name) == ("functools", "partial")
                if is_partial or node.module in ("operator", "itertools"):
                    names.add(alias.asname or alias.name)
    return names


def _form_of(node: ast.AST, borrowed: set[str]) -> str:
    """The packed form that a node is; an empty text if it is none."""
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=[_, _, *_]), *_], value=ast.Tuple()):
            return "parallel"  # a, b = x, y
        case ast.IfExp():
            return "conditional"  # x if c else y
        case ast.Call(func=ast.Name(id="map" | "filter")):
            return "map"
        case ast.Call(func=ast.Name(id=name)) if name in borrowed:
            return "borrowed"  # attrgetter("x"), chain(a, b), partial(f, a)
        case ast.Call(func=ast.Attribute() as function):
            name = ast.unparse(function)
            prefixes = ("functools.partial", "operator.", "itertools.")
            return "borrowed" if name.startswith(prefixes) else ""
        case ast.Starred(value=ast.Tuple() | ast.List()):
            return "starred"  # f(*(a, b))
        case ast.BinOp(op=ast.Mult(), left=left, right=right):
            by_condition = _is_text(left) and _is_condition(right)
            by_text = _is_condition(left) and _is_text(right)
            return "text_times_condition" if by_condition or by_text else ""  # "s" * (n > 1)
    return ""


def _is_text(node: ast.expr) -> bool:
    is_constant = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_constant or isinstance(node, ast.JoinedStr)


def _is_condition(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    if isinstance(node, ast.Call):
        return getattr(node.func, "id", "") == "bool"
    return isinstance(node, (ast.Compare, ast.Name, ast.Attribute, ast.BoolOp))


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
    twice = {name: places for name, places in found.items() if len(places) > 1}
    return {name: sorted(places) for name, places in twice.items()}


@functools.cache
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
    is_example = False
    block = 0
    for line in docstring.splitlines():
        bare = line.strip()
        indent = len(line) - len(line.lstrip())
        if block and (not bare or indent >= block):
            continue
        is_example = bare.startswith(">>>") or (is_example and bool(bare))
        if not is_example:
            kept.append(line)
        block = indent + 1 if bare.endswith("::") else 0
    return "\n".join(kept)


@dataclass
class Counts:
    """What is counted of some modules. No count says alone whether code is plain.

    Attributes:
        nodes: of the syntax tree.
        nodes_per_line: nodes per code line.
        packed_lines: lines with more than 25 nodes, per 1,000 code lines.
        forms: each of `FORMS`, per 1,000 code lines.
        branches: per 1,000 nodes.
        over_14: functions of more branches.
        relatives: per 1,000 words.
        large: classes.
    """

    nodes: int
    nodes_per_line: float
    packed_lines: float
    forms: dict[str, float]
    branches: float
    over_14: int
    relatives: float
    large: int


def counts(some: list[Module]) -> Counts:
    all_nodes = sum(nodes(module) for module in some)
    all_branches = sum(branches(module.tree) for module in some)
    lines = max(1, sum(code_lines(module) for module in some))
    packed = sum(len(packed_lines(module)) for module in some)
    forms: collections.Counter[str] = collections.Counter()
    for module in some:
        forms.update(packed_forms(module))
    return Counts(
        nodes=all_nodes,
        nodes_per_line=round(all_nodes / lines, 2),
        packed_lines=_per_thousand(packed, lines),
        forms={form: _per_thousand(forms[form], lines) for form in FORMS},
        branches=_per_thousand(all_branches, all_nodes),
        over_14=sum(len(hard_functions(module, 14)) for module in some),
        relatives=relatives(some),
        large=sum(len(large_classes(module)) for module in some),
    )


def _per_thousand(count: int, of: int) -> float:
    return round(1000 * count / of, 1)


def relatives(some: list[Module]) -> float:
    """Per 1,000 words of docstrings and comments."""
    all_words = [word for module in some for word in words(module)]
    found = sum(word in RELATIVES for word in all_words)
    return _per_thousand(found, max(1, len(all_words)))


def main() -> None:
    everything = modules()
    rooms: dict[str, list[Module]] = collections.defaultdict(list)
    for module in everything:
        rooms[module.room].append(module)
    found = {room: counts(some) for room, some in rooms.items()}
    for room in sorted(found, key=lambda room: found[room].nodes):
        print(f"{room:20}", found[room])
    print(f"{'(all)':20}", counts(everything))


if __name__ == "__main__":
    main()
