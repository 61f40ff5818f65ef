"""Tests go through the public face of the package, unless they test that very part."""

import ast
from collections.abc import Iterator
from pathlib import Path

TOP = Path(__file__).parents[2]
# What a file may reach, because it tests that very part: there is no other way to see it, or to make it go wrong.
ALLOWED = {
    "launch/programs/deterministic.py": {"_shared"},
    "launch/programs/elastic_saving.py": {"_finish"},
    "launch/programs/parameter_server_faults.py": {"_HEADER", "_PIECE", "_queue"},
    "mpi/fault_tolerance/test_survivors.py": {"_family", "_members"},
    "mpi/pytorch/test_mirroring.py": {"_torch"},
    "mpi/pytorch/test_modules_in_closures.py": {"_numbers", "_work"},
    "mpi/pytorch/test_overlap.py": {"_buckets", "_mirroring", "_sent", "_thread", "_wires"},
    "mpi/pytorch/test_shared_parameters.py": {"_parameters"},
    "mpi/test_agreement.py": {"_WAITED", "_agreement"},
    "mpi/test_checkpoint.py": {"_communicator", "_saving"},
    "mpi/test_implementations.py": {"_CACHED", "_left"},
    "mpi/test_post.py": {"_arriving", "_buffers"},
    "mpi/test_preemption.py": {"_leaves_together"},
    "mpi/test_replication.py": {"_used"},
    "mpi/test_shared_window.py": {"_flow", "_limit", "_record", "_scratch", "_window"},
    "mpi/test_wire_formats.py": {"_mirroring"},
    "unit/parameter_server/test_server_optimizers.py": {"_indices", "_values"},
}


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _names_of_the_package() -> set[str]:
    """Private functions, classes, attributes and variables that it defines."""
    names = set()
    for file in (TOP / "mpistrat").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    return {name for name in names if _private(name)}


def _reached(tree: ast.Module) -> Iterator[str]:
    """Private names of something else than `self`, read, set or patched."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _private(node.attr):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not own:
                yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names if _private(alias.name))
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "setattr":
            yield from (
                argument.value
                for argument in node.args
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
            )


def _defined(tree: ast.Module) -> set[str]:
    """Private attributes of the file's own classes."""
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {
        node.attr
        for node in nodes
        if isinstance(node.ctx, ast.Store) and getattr(node.value, "id", "") == "self"
    }


def test_private_names_are_reached_where_they_are_tested() -> None:
    package = _names_of_the_package()
    found = {}
    for file in sorted((TOP / "tests").rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        if names := (set(_reached(tree)) & package) - _defined(tree):
            found[str(file.relative_to(TOP / "tests"))] = names
    assert found == ALLOWED
