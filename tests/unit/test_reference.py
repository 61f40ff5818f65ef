"""docs/docstrings.py, which makes the reference: a docstring's example is in it, as code."""

import importlib
import sys
import types

import pytest
from docutils.core import publish_doctree
from docutils.nodes import doctest_block, literal_block

from support.documentation import TOP
from support.examples import PublicName, examples_of, public_names


@pytest.fixture(scope="module")
def docstrings() -> types.ModuleType:
    sys.path.append(str(TOP / "docs"))
    try:
        return importlib.import_module("docstrings")
    finally:
        sys.path.remove(str(TOP / "docs"))


@pytest.mark.parametrize("name", public_names(), ids=lambda name: name.path)
def test_the_reference_shows_each_example(docstrings: types.ModuleType, name: PublicName) -> None:
    docstrings_of_name = (name.docstring(), *name.members().values())
    for docstring in filter(examples_of, docstrings_of_name):
        lines = docstring.splitlines()
        docstrings.to_rst(None, "class", name.path, name.thing, None, lines)
        settings = {"report_level": 5, "default_role": "literal"}
        tree = publish_doctree("\n".join(lines), settings_overrides=settings)
        blocks = (*tree.findall(doctest_block), *tree.findall(literal_block))
        shown = "\n".join(block.astext() for block in blocks)
        assert all(example.code.strip() in shown for example in examples_of(docstring)), shown
