"""Signatures as inspect has them, from the ways in which extensions write them down.

Cython writes `allReduce(self, intptr_t sendbuf, int op=0)` into a docstring. For each overload, pybind11 writes
`allreduce(self: Backend, tensors: Sequence[Tensor], opts: Options = <Options object at 0x7f>) -> Work`.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from typing import Any

PAIRS = {"(": ")", "[": "]", "<": ">", "{": "}"}


def of_docstring(text: str, name: str) -> list[inspect.Signature]:
    """What `text` says that `name` takes, once for each overload; none if it says nothing."""
    heads = re.finditer(rf"(?:^|\n)(?:\d+\. )?(?:\w+\.)*{re.escape(name)}(?=\()", text.strip())
    lists = (_inside(text.strip()[head.end() :]) for head in heads)
    return [_signature(inside) for inside in lists if inside != "*args, **kwargs"]


def of_stub(function: ast.FunctionDef) -> inspect.Signature:
    """What a function of a `.pyi` takes."""
    return _signature(ast.unparse(function.args))


def _signature(parameters: str) -> inspect.Signature:
    found: list[inspect.Parameter] = []
    kind: Any = inspect.Parameter.POSITIONAL_OR_KEYWORD
    for parameter in _split(parameters):
        if not parameter:
            continue
        if parameter == "/":
            found = [each.replace(kind=inspect.Parameter.POSITIONAL_ONLY) for each in found]
        elif parameter == "*":
            kind = inspect.Parameter.KEYWORD_ONLY
        elif parameter.startswith("**"):
            found.append(inspect.Parameter(parameter[2:], inspect.Parameter.VAR_KEYWORD))
        elif parameter.startswith("*"):
            found.append(inspect.Parameter(parameter[1:], inspect.Parameter.VAR_POSITIONAL))
            kind = inspect.Parameter.KEYWORD_ONLY
        else:
            declared, has_default, _ = parameter.partition("=")
            # Before the name there is a type of C's, or after it one of Python's.
            name = declared.partition(":")[0].split()[-1]
            default = ... if has_default else inspect.Parameter.empty
            found.append(inspect.Parameter(name, kind, default=default))
    return inspect.Signature(found)


def _inside(text: str) -> str:
    """What the parentheses hold with which `text` begins."""
    ends = [at for at, depth in _depths(text) if at and not depth]
    return text[1 : ends[0]]


def _split(text: str) -> Iterator[str]:
    start = 0
    for at, depth in _depths(text):
        if text[at] == "," and not depth:
            yield text[start:at].strip()
            start = at + 1
    yield text[start:].strip()


def _depths(text: str) -> Iterator[tuple[int, int]]:
    """How many brackets are open after each character."""
    depth = 0
    for at, character in enumerate(text):
        if character in PAIRS:
            depth += 1
        elif character in PAIRS.values() and text[at - 1] != "-":  # the end of an arrow is none
            depth -= 1
        yield at, depth
