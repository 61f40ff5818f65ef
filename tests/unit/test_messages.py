"""The texts of errors and notices: short, and with the phrases that programs look for."""

import ast
import re
from collections.abc import Iterator

import pytest

from mpistrat import errors
from support import house

# Users' scripts, our pages and our tests search the output of a job for these words, so they stay. {} is a value.
PHRASES = (
    "rank {} of {}",
    " not come to it",  # "rank 1 has", "ranks 1, 2 have"
    "was killed by",
    "ended with exit code {}",
    "failed; ending the job",
    "Ending the job.",
    "This report is in {}",
    "collective number {}",
    "left after collective number {}",
    "all ranks have come to it, but it does not end",
    "has come to the end of its program",
    "has become another program, by exec: {}",
    "cannot be used any more",
    "see a world of 1",
    "ranks were started",
    "go on after step {} without",
    "replicas are left",
)
# The names of error classes are searched for, too.
ERRORS = (
    *("AbortedError", "CancelledError", "ClosureInputError", "CollectiveMismatchError"),
    *("DeadlineExceededError", "DivergenceError", "FailedPreconditionError"),
    *("InvalidArgumentError", "NotFoundError", "OpError", "OutOfRangeError", "RankLostError"),
    *("StallError", "TooFewReplicasError", "TopologyError", "UnavailableError"),
)
NOTICES = {"tell", "tell_once", "warn", "warn_on_first_rank", "warn_once"}
SENTENCES = 3


def text_of(node: ast.AST) -> str:
    """The text of a string or an f-string, each value of it as {}; else nothing."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "{}" for part in node.values)
    return ""


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """All strings of the package but docstrings."""
    nodes = [node for module in house.modules() for node in ast.walk(module.tree)]
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    return [text for node in nodes if id(node) not in docstrings and (text := text_of(node))]


@pytest.mark.parametrize("phrase", PHRASES)
def test_the_words_that_programs_look_for_stay(texts: list[str], phrase: str) -> None:
    assert any(phrase in text for text in texts)


def test_the_names_of_errors_stay() -> None:
    assert sorted(errors.__all__) == sorted(ERRORS)


def messages() -> Iterator[tuple[str, str]]:
    """The text of each error and each notice of the package, with its place."""
    for module in house.modules():
        for node in ast.walk(module.tree):
            call = node.exc if isinstance(node, ast.Raise) else node
            if isinstance(call, ast.Call) and (isinstance(node, ast.Raise) or is_notice(call)):
                for text in map(text_of, call.args):
                    if text:
                        yield f"{module.name}:{node.lineno}", text


def is_notice(call: ast.Call) -> bool:
    return ast.unparse(call.func).rpartition(".")[2] in NOTICES


def sentences(text: str) -> int:
    return len(re.findall(r"\S[.?!](?= [A-Z{]|$|\n)", text.rstrip(".") + "."))


def test_a_message_has_three_sentences_at_most() -> None:
    long = {place: text for place, text in messages() if sentences(text) > SENTENCES}
    assert not long


def test_sentences_are_counted() -> None:
    assert sentences("One, with 3.5 s. Two? {} is three. And so on") == 4
    assert sentences("got 3") == 1
