"""A Sphinx extension: from the sections of our docstrings ("Called by:", "Args:", …) to reStructuredText."""

import re
from collections.abc import Iterator
from pathlib import Path

from sphinx.application import Sphinx

SECTION = re.compile(r"(Args|Attributes|Called by|Context|Made by|Raises|Returns): *(.*)")
SEVERAL = re.compile(r"(?<=\S) {3,}(?=[A-Z][a-z ]+: )")  # "Called by: a rank.   Context: replica."
ENTRY = re.compile(r"([*\w]+(?:, [*\w]+)*): +(.*)")
EXAMPLE = re.compile(r"(Example(?:, .*?)?):(:?)")  # tests/support/examples.py has the forms
CONSTANT = re.compile(r"([A-Z][A-Z_]+): +(.*)")  # a member of an enum
INFLECTED = re.compile(r"(`[^`]+`)(?=\w)")  # "`Variable`s"

# The pages' classes and modules, by name.
DESCRIBED = {
    name
    for page in (Path(__file__).parent / "api").glob("*.md")
    for name in re.findall(r"^\.\. auto\w+:: (?:mpistrat\.input\.)?(\S+)", page.read_text(), re.M)
}


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", to_rst)
    app.connect("autodoc-process-bases", leave_out_hidden_bases)


def leave_out_hidden_bases(
    app: Sphinx, name: str, of: object, options: object, bases: list[type]
) -> None:
    """Replace each base that no page describes by its own bases, in place. Called by: Sphinx, for each class.

    The page shows the members of such a base with the class, by `:inherited-members:`.
    """
    shown = dict.fromkeys(outer for base in bases for outer in _described(base))
    shown.pop(object, None)
    bases[:] = list(shown) or [object]


def _described(base: type) -> list[type]:
    described = not DESCRIBED.isdisjoint((base.__name__, base.__module__))
    if described or not base.__module__.startswith("mpistrat."):
        return [base]
    return [b for outer in base.__bases__ for b in _described(outer)]


def to_rst(
    app: Sphinx, what: str, name: str, of: object, options: object, lines: list[str]
) -> None:
    """Rewrite the `lines` of one docstring in place. Called by: Sphinx, for each."""
    parts = [part for line in lines for part in SEVERAL.split(line)]
    lines[:] = _converted([INFLECTED.sub(r"\1\\ ", part) for part in parts])


def _converted(lines: list[str]) -> Iterator[str]:
    indent: int | None = None  # of what continues the field that began last
    example = False
    for line in lines:
        example = example and (not line or line.startswith("    "))
        if example:
            yield line
        elif heading := EXAMPLE.fullmatch(line):
            yield from ("", f"*{heading[1]}*:{heading[2]}", "")
            example = True
            indent = None
        elif section := SECTION.fullmatch(line):
            if indent is None:
                yield ""
            yield f":{section[1]}: {section[2]}".rstrip()
            indent = 4
        elif constant := CONSTANT.fullmatch(line):
            yield from ("", f"- `{constant[1]}`: {constant[2]}")
            indent = 2
        elif not line.strip():
            yield ""
            indent = None
        elif indent is None:
            yield line
        elif line[:4].isspace() and (entry := ENTRY.fullmatch(line[4:])):
            names = entry[1].replace("*", r"\*")
            yield from ("", f"    - **{names}**: {entry[2]}")
            indent = 6
        else:
            yield " " * indent + line.strip()
    yield ""
