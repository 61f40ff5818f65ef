"""The measures of the house: what has been reached is held, and a run with `-s` prints how much there is."""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "mpistrat"

CODE_LINES = 39287
# Classes with more methods than `LARGE`, and the reason of each. No other class may have so many.
LARGE_CLASSES = {
    "CheckpointManager": "tf.train.CheckpointManager and ranks that restore together: programs know the names",
    "Communicator": "a method for each collective of MPI",
    "MpistratProcessGroup": "torch calls each collective, and asks each question, by a name of its own",
    "Observer": "an event of a node's ranks is one method",
    "Router": "a Communicator's methods",
    "Strategy": "tf.distribute.Strategy, and what programs of PyTorch ask: programs know the names",
    "StrategyExtended": "tf.distribute.StrategyExtended: programs know the names",
    "Variable": "tf.Variable, which is also a number: programs know the names",
}
TOP_LEVEL_MODULES = 14
ASSERTS_OF_NONE = 0

LARGE = 15  # methods
_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return {
        path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")
    }


def test_lines_of_code(sources: dict[str, str]) -> None:
    """Without docstrings, comments and blank lines."""
    rooms: dict[str, int] = {}
    for name, source in sources.items():
        room = name.split("/")[0] if "/" in name else "."
        rooms[room] = rooms.get(room, 0) + len(code_lines(source))
    total = sum(rooms.values())
    print(f"\n{total} lines of code:", sorted(rooms.items(), key=lambda entry: -entry[1]))
    assert total <= CODE_LINES


def code_lines(source: str) -> set[int]:
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - set(docstring_lines(ast.parse(source)))


def docstring_lines(tree: ast.Module) -> Iterator[int]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            yield from range(docstring.lineno, (docstring.end_lineno or 0) + 1)


def test_few_classes_are_large(sources: dict[str, str]) -> None:
    found = {
        node.name: f"{methods} in {name}"
        for name, source in sources.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
        and (methods := sum(isinstance(part, ast.FunctionDef) for part in node.body)) > LARGE
    }
    print(f"\nclasses with more than {LARGE} methods:", found)
    assert found.keys() <= LARGE_CLASSES.keys()


def test_the_package_has_few_modules_of_its_own(sources: dict[str, str]) -> None:
    assert sum("/" not in name for name in sources) <= TOP_LEVEL_MODULES


def test_nothing_is_half_built(sources: dict[str, str]) -> None:
    """`assert … is not None` says that something is there later than its owner."""
    found = {
        name: count
        for name, source in sorted(sources.items())
        if (count := sum(is_of_none(node) for node in ast.walk(ast.parse(source))))
    }
    print("\nassert … is not None:", found)
    assert sum(found.values()) <= ASSERTS_OF_NONE


def is_of_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Assert) and "is not None" in ast.unparse(node.test)
