"""Words that are not used in names: private ones, for which the field has a word, and those that say nothing.

docs/glossary.md has the words of our own that are used.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]

# Say nothing of what they name.
EMPTY = {"told", "given", "one", "beside", "looks", "noted"}

# By private word, the field's.
PRIVATE = {
    "alarm": "AbortChannel",
    "culprit": "raise_explained",
    "culprits": "raise_explained",
    "departures": "ExitCoordinator",
    "kitchen": "ResourceCache",
    "mail": "channel",
    "parcel": "PackedTensor",
    "parcels": "PackedTensor",
    "patient": "PipelinedTransport",
    "post": "rpc",
    "recipe": "Resource, OptimizerDefinition",
    "recipes": "Resource, OptimizerDefinition",
    "registrar": "ExitCoordinator",
    "rider": "piggyback",
    "riders": "piggyback",
    "served": "remote",
    "station": "CommunicatorWatch",
    "travelling": "ObjectReferences",
}

# Names of others: Python's, and torch's hooks.
OTHERS = {
    "__post_init__",
    "_post_accumulate_grad_hooks",
    "do_POST",
    "register_optimizer_step_post_hook",
    "register_post_accumulate_grad_hook",
    "register_state_dict_post_hook",
}


def names_in(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The names, but for uses of what is imported: a name is checked where it is defined."""
    imported = imported_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            if not (node.id in imported and isinstance(node.ctx, ast.Load)):
                yield node.id, node.lineno
        elif isinstance(node, ast.Attribute):
            if not (isinstance(node.value, ast.Name) and node.value.id in imported):
                yield node.attr, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node.lineno
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg, node.value.lineno
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname, node.lineno


def imported_names(tree: ast.AST) -> set[str]:
    return {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }


def wrong_words(name: str) -> set[str]:
    if name in OTHERS:
        return set()
    words = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower().strip("_").split("_")
    return {words[0]} & EMPTY if len(words) == 1 and words[0] in EMPTY else set(words) & {*PRIVATE}


@pytest.mark.parametrize("folder", ["mpistrat", "benchmarks", "scripts", "tests"])
def test_names_are_the_fields_words(folder: str) -> None:
    found = []
    for path in sorted((TOP / folder).rglob("*.py")):
        file = path.relative_to(TOP).as_posix()
        names = [(path.stem, 1), *names_in(ast.parse(path.read_text()))]
        found += [f"{file}:{line}: {name}" for name, line in names if wrong_words(name)]
    assert not found, f"{len(found)} names, see PRIVATE for the words to use:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "name", ["told", "_given", "ServedRows", "post_office", "travelling_modules"]
)
def test_private_and_empty_words_are_found(name: str) -> None:
    assert wrong_words(name)


@pytest.mark.parametrize(
    "name", ["one_device", "given_name", "__post_init__", "posterior", "stationary"]
)
def test_other_names_are_not(name: str) -> None:
    assert not wrong_words(name)
