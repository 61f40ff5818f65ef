"""Each public class and function has an example in its docstring, and the examples that one rank can run are right."""

import ast
import doctest
import inspect
import itertools
import operator
import re
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import mpistrat as ms
from support.examples import NEEDS, Example, PublicName, examples_of, public_names

NAMES = {name.path: name for name in public_names()}
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
LINES = range(2, 7)
SECONDS = 60
MEMBERS = {member for name in NAMES.values() for member in name.members()}
ATTRIBUTES = {  # of data classes, and under "Attributes:"
    attribute
    for name in NAMES.values()
    for attribute in [
        *getattr(name.thing, "__annotations__", ()),
        *re.findall(r"^ *(?:Attributes: *)?(\w+):", name.docstring(), re.M),
    ]
}
OF_OTHERS = {
    "backward",
    "close",
    "manual_seed",
    "mean",
    "random",
    "zero_grad",
}  # torch's and Python's


@pytest.fixture(scope="module")
def seconds() -> list[float]:
    """How long the examples have taken, one after the other."""
    return []


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> PublicName:
    return NAMES[request.param]


def test_it_has_an_example(name: PublicName) -> None:
    assert examples_of(name.docstring()), f"the docstring of {name.path} has no `Example:`"


def test_each_method_has_a_docstring(name: PublicName) -> None:
    """The reference leaves out a method without one."""
    missing = [member for member, docstring in name.members().items() if not docstring]
    assert not missing, f"{name.path} has methods without a docstring: {missing}"


def test_each_example_has_a_heading_that_is_known(name: PublicName) -> None:
    for docstring in (name.docstring(), *name.members().values()):
        headings = re.findall(r"^ *Examples?\b.*:$", docstring, re.M)
        assert len(headings) == len(examples_of(docstring)), headings


def test_each_method_is_in_an_example(name: PublicName) -> None:
    used: set[str] = set().union(*(example.names() for example in name.examples()))
    missing = name.members().keys() - used
    assert not missing, f"no example of {name.path} uses {sorted(missing)}"


def test_examples_are_short(name: PublicName) -> None:
    for example in name.examples():
        lines = [line for line in example.code.splitlines() if line.strip()]
        assert len(lines) in LINES, example.code


def test_examples_run(
    name: PublicName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: list[float]
) -> None:
    monkeypatch.chdir(tmp_path)
    failures: list[str] = []
    began = time.perf_counter()
    for example in name.examples():
        if example.runs:
            names = {"ms": ms, "np": np, "torch": torch}
            test = doctest.DocTestParser().get_doctest(example.code, names, name.path, None, 0)
            result = doctest.DocTestRunner(optionflags=OPTIONS).run(test, out=failures.append)
            assert result.attempted, f"no line begins with >>> in\n{example.code}"
    assert not failures, "".join(failures)
    seconds.append(time.perf_counter() - began)
    assert sum(seconds) < SECONDS, "all examples together take too long"


def test_examples_that_do_not_run_say_why_and_name_what_exists(name: PublicName) -> None:
    for example in name.examples():
        if not example.runs:
            assert example.needs in NEEDS, (example.needs, example.code)
            for node in ast.walk(ast.parse(example.code)):
                if isinstance(node, ast.Attribute):
                    assert exists(node), ast.unparse(node)


def exists(node: ast.Attribute) -> bool:
    text = ast.unparse(node)
    if re.fullmatch(r"(ms|np|torch)(\.\w+)+", text):
        return (
            operator.attrgetter(text)(types.SimpleNamespace(ms=ms, np=np, torch=torch)) is not None
        )
    return node.attr in MEMBERS | ATTRIBUTES | OF_OTHERS


def test_text_after_a_section_begins_a_paragraph(name: PublicName) -> None:
    """Without a blank line, the reference would show it as the end of the section."""
    section = re.compile(
        r"([A-Z][A-Z_]+|Args|Attributes|Called by|Context|Made by|Raises|Returns|Example\b.*):"
    )
    for docstring in (name.docstring(), *name.members().values()):
        lines = docstring.splitlines()
        for before, line in itertools.pairwise(lines):
            in_section = before.startswith("    ") or section.match(before)
            begins = line and not line.startswith((" ", ")"))
            assert not (in_section and begins) or section.match(line), line


def test_no_base_class_is_a_dead_end(name: PublicName) -> None:
    """The reference shows what a base class gives: with the class, or with another class that has it too."""
    classes = name.thing.__mro__ if inspect.isclass(name.thing) else ()
    above = [other for other in NAMES.values() if other.thing in classes]
    shown = {member for n in above for member in n.members()}
    for base in name.hidden_bases():
        assert PublicName("", base).members().keys() <= shown, base


def test_an_example_is_found() -> None:
    docstring = """Add.

    Returns: a number.

    Example:
        >>> for x in (1, 2):
        ...     print(x + 1)
        2
        3

    Example, on a TPU::

        add(1)
        add.all(2)
    """
    runs, shown = examples_of(inspect.cleandoc(docstring))
    assert runs == Example(">>> for x in (1, 2):\n...     print(x + 1)\n2\n3\n", "", runs=True)
    assert shown == Example("add(1)\nadd.all(2)\n", "a TPU", runs=False)
    assert shown.names() == {"all"}
    assert runs.names() == set()
