"""The texts of errors and notices: short, and with the phrases that programs look for."""

import ast
import re
from collections.abc import Iterator

import pytest

from mpistrat import errors
from support import house

# Users' scripts, our pages and our tests search the output of a job for these words, so they stay, in these files of
# the package. {} is a value.
PHRASES = {
    "rank {} of {} ({}, pid {})": "liveness/ending/rank_end.py",
    " failed; ending the job": "liveness/ending/rank_end.py",
    "Ending the job.": "liveness/observer/observer.py",
    "This report is in {}": "liveness/observer/observer.py",
    "was killed by": "liveness/processes.py",
    "ended with exit code {}": "liveness/processes.py",
    " not come to it": "liveness/observer/report.py",  # "rank 1 has", "ranks 1, 2 have"
    " collective number {}, entered {} s ago: {}": "liveness/observer/report.py",
    "in collective number {}": "liveness/observer/report.py",
    "all ranks have come to it, but it does not end": "liveness/observer/report.py",
    "has come to the end of its program": "liveness/observer/report.py",
    "has become another program, by exec: {}": "liveness/observer/report.py",
    "left after collective number {}": "liveness/ending/exit_coordinator.py",
    "did not call": "communicators/contract/call_signature.py",
    "cannot connect to that of rank 0": "communicators/torch_store.py",
    "is not reached from": "communicators/torch_store.py",
    "cannot be used any more": "communicators/transports/accelerator/collective_group.py",
    "see a world of 1": "cluster_resolver/launcher.py",
    "go on after step {} without": "fault_tolerance/elastic.py",
    "replicas are left": "fault_tolerance/elastic.py",
    "several steps before the first backward()": "replicas/given_steps.py",
    # The labels of collectives
    "bucket {} of {}": "pytorch/gradients/buckets.py",
    "constructor of {}": "strategies/multi_worker_mirrored.py",
    "gradients of {} parameters": "pytorch/gradients/dense_sums.py",
    "digests of what is mirrored": "pytorch/watch/divergence_report.py",
    "first batch of the dataset": "input/readers.py",
    "mirrored parameters": "pytorch/mirroring.py",
}
# The names of error classes are searched for, too.
ERRORS = (
    *("AbortedError", "CancelledError", "ClosureInputError", "CollectiveMismatchError"),
    *("DeadlineExceededError", "DivergenceError", "FailedPreconditionError"),
    *("InvalidArgumentError", "NotFoundError", "OpError", "OutOfRangeError", "RankLostError"),
    *("StallError", "TooFewReplicasError", "TopologyError", "UnavailableError"),
)
HELP = {"help", "description", "usage", "epilog"}  # arguments of argparse: pages, not messages
SENTENCES, WORDS = 3, 55


def text_of(node: ast.AST) -> str:
    """The text of a string or an f-string, each value of it as {}; else nothing."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "{}" for part in node.values)
    return ""


def texts_of(module: house.Module) -> Iterator[tuple[str, str]]:
    """The strings of a module with their places: no docstrings, no help of commands, no parts of other strings."""
    nodes = list(ast.walk(module.tree))
    others = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.keyword) and node.arg in HELP:
            others.update(map(id, ast.walk(node.value)))
        elif isinstance(node, ast.JoinedStr):
            others.update(id(part) for part in ast.walk(node) if part is not node)
    for node in nodes:
        if id(node) not in others and (text := text_of(node)):
            yield f"{module.name}:{getattr(node, 'lineno', 0)}", text


@pytest.fixture(scope="module")
def texts() -> list[tuple[str, str]]:
    return [entry for module in house.modules() for entry in texts_of(module)]


@pytest.mark.parametrize("phrase", PHRASES)
def test_the_words_that_programs_look_for_stay(texts: list[tuple[str, str]], phrase: str) -> None:
    file = PHRASES[phrase]
    assert any(phrase in text for place, text in texts if place.startswith(f"{file}:"))


def test_the_names_of_errors_stay() -> None:
    assert sorted(errors.__all__) == sorted(ERRORS)


def sentences(text: str) -> int:
    return len(re.findall(r"\S[.?!]\)?(?= [A-Z{(`\"']|$|\n)", text.rstrip(".") + "."))


def test_a_message_has_three_sentences_at_most(texts: list[tuple[str, str]]) -> None:
    """Every string is looked at, for an error or a notice may be put together elsewhere."""
    assert not {place: text for place, text in texts if sentences(text) > SENTENCES}


def test_a_message_has_few_words(texts: list[tuple[str, str]]) -> None:
    messages = {place: text for place, text in texts if "\n" not in text}
    assert not {place: text for place, text in messages.items() if len(text.split()) > WORDS}


def test_no_message_names_an_extra() -> None:
    """It would be '.[NAME]' from a checkout, and 'mpistrat[NAME]' from an index."""
    named = re.compile(r"(mpistrat|'\.)\[\w+\]")
    assert named.search("pip install 'mpistrat[mpich]'")
    assert named.search("pip install '.[mpich]'")
    assert not [module.name for module in house.modules() if named.search(module.source)]


def test_sentences_are_counted() -> None:
    assert sentences("One, with 3.5 s. Two? {} is three. (Four.) `five` is one. And so on") == 6
    assert sentences("got 3") == 1


def test_texts_are_found() -> None:
    source = '''"""A docstring."""
def f(x):
    """Another."""
    parser.add(help="no message")
    raise made_by(f"rank {x} of {x:>3}" + " is late")
'''
    module = house.Module("f.py", source, ast.parse(source))
    assert list(texts_of(module)) == [("f.py:5", "rank {} of {}"), ("f.py:5", " is late")]
