"""Tests use the public face of the package, so that what is behind it can change without them."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.parent / "mpistrat"

# By file, the names of the package that it may use or that mean something else there, and why.
ALLOWED = {
    "mpi/torch_distributed/test_answers.py": {
        "_get_backend": "torch's",
        "_get_sequence_number_for_group": "torch's",
        "_set_sequence_number_for_group": "torch's",
        "_timeout": "torch's",
    },
    "support/signatures/of_torch.py": {"_C": "torch's"},
    "unit/checkpoint/test_state_files.py": {"_metadata": "torch's"},
    "unit/parameter_server/coordinator/test_failures.py": {
        "_execute": "a traceback must not have it"
    },
    "unit/parameter_server/test_server_optimizers.py": {"_values": "torch's"},
    "unit/test_replaced_functions.py": {
        "_compiled_call_impl": "torch's",
        "_replace_reductions": "each replacement is to be made",
        "_replace_state_dict": "each replacement is to be made",
        "_see_metrics": "each replacement is to be made",
        "_watch_registrations": "each replacement is to be made",
    },
}

# In a program, or a path to what is replaced, that is text: `x._name`, `x()._name`, `x[0]._name`.
IN_TEXT = re.compile(r"(?:\b(?!self\.|cls\.)\w+|[)\]])\.(_[a-zA-Z]\w*)")


def is_private(name: str) -> bool:
    return re.fullmatch("_[a-zA-Z0-9]\\w*", name) is not None


def is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def names_of_package() -> set[str]:
    """The private names that are defined anywhere in the package."""
    names = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    return set(filter(is_private, names))


def names_used(tree: ast.AST) -> Iterator[str]:
    """The private names that a test takes of something that is not its own, once for each use."""
    own = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_own(node)}
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute) and not is_own(node):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mpistrat"):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # A name alone is an argument of setattr.
            text = node.value
            names = [text] if text.isidentifier() else IN_TEXT.findall(text)
        yield from (name for name in names if is_private(name) and name not in own)


def uses() -> dict[str, list[str]]:
    """By test file, the private names of the package that it uses."""
    known, found = names_of_package(), {}
    for file in sorted(TESTS.rglob("*.py")):
        if file != Path(__file__):
            used = [name for name in names_used(ast.parse(file.read_text())) if name in known]
            found[str(file.relative_to(TESTS))] = used
    return {file: used for file, used in found.items() if used}


def test_tests_use_no_private_names_but_those_allowed() -> None:
    assert {file: set(used) for file, used in uses().items()} == {
        file: set(reasons) for file, reasons in ALLOWED.items()
    }
