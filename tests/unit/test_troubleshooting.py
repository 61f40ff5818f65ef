"""docs/troubleshooting.md: each error and each finding of the doctor names a heading there, with its words below it."""

import ast
import importlib
import inspect
import multiprocessing
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mpi4py
import pytest
import torch

from mpistrat import errors
from mpistrat.tools import doctor
from mpistrat.tools.doctor import mpi_library
from support import house

TOP = Path(__file__).parents[2]
DOCTOR = Path(doctor.__file__).parent
PAGE = (TOP / "docs/troubleshooting.md").read_text(encoding="utf-8")
SOURCE = "\n".join(
    file.read_text() for file in house.PACKAGE.rglob("*.py") if file.name != "errors.py"
)
SECTIONS = dict(re.findall(r"(?ms)^### (.+?)\n(.*?)(?=^##|\Z)", PAGE))
# A function that makes a warning or problem. Some functions choose between the two: `_bad(rate, median)(text, …)`.
MAKES = re.compile(r"(\b(problem|warning|bad|Finding)|\b_bad\w*\(.*\))$")
OURS = re.compile(r"mpistrat: (?!correct)|mpistrat\.errors")
NAMED = re.compile(r"\(docs/troubleshooting\.md: (.+?)\)")
# Of the message of each error; "" for an error that the package does not raise itself.
WORDS = {
    "AbortedError": "",
    "CancelledError": "was cancelled because another raised",
    "ClosureInputError": "could not make its part of a per-worker value",
    "CollectiveMismatchError": "did not call the same collective",
    "DeadlineExceededError": "",
    "DivergenceError": "is not the same any more on",
    "FailedPreconditionError": "came after the work that it belongs to was over",
    "InvalidArgumentError": "only numbers can be reduced",
    "NotFoundError": "because it shares out files",
    "OpError": "",
    "OutOfRangeError": "the distributed dataset has ended",
    "RankLostError": "a rank of this communicator has failed",
    "StallError": "not come to it",
    "TooFewReplicasError": "replicas are left, and min_replicas=",
    "TopologyError": "MPI says",
    "UnavailableError": "the job must be started again",
}
# Messages of others that are shown, by the file that has them.
OF_OTHERS = {
    "expected, but not set": "distributed/rendezvous.py",
    "Default process group has not been initialized": "distributed/distributed_c10d.py",
    "Timed out initializing process group in store based barrier": "distributed/distributed_c10d.py",
    "Distributed package doesn't have NCCL built in": "distributed/distributed_c10d.py",
    "Missing key(s) in state_dict": "nn/modules/module.py",
    "Unexpected key(s) in state_dict": "nn/modules/module.py",
    "Weights only load failed": "serialization.py",
    "exited unexpectedly": "utils/data/dataloader.py",
    "Torch not compiled with CUDA enabled": "cuda/__init__.py",
    "Cannot re-initialize CUDA in forked subprocess": "cuda/__init__.py",
}


def squeezed(text: str) -> str:
    return " ".join(text.split())


def words_of(text: ast.expr) -> tuple[str, ...]:
    """What a string or an f-string has between its values; () for a variable."""
    parts = text.values if isinstance(text, ast.JoinedStr) else [text]
    texts = [p.value for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, str)]
    return tuple(words for text in texts if (words := squeezed(text)) not in {"", "."})


def stand_in_order(pieces: tuple[str, ...], text: str) -> bool:
    place = 0
    for piece in pieces:
        place = text.find(piece, place)
        if place < 0:
            return False
        place += len(piece)
    return True


def calls() -> Iterator[tuple[dict[str, Any], ast.Call]]:
    """The calls in the doctor's code that make a warning or problem, each with its module's names."""
    for file in sorted(DOCTOR.glob("*.py")):
        names = vars(importlib.import_module(f"{doctor.__name__}.{file.stem}"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and MAKES.search(ast.unparse(node.func)):
                yield names, node


CALLS = list(calls())
FINDINGS = sorted(
    {
        (eval(ast.unparse(call.args[-1]), names), words_of(call.args[-3]))
        for names, call in CALLS
        if not isinstance(call.args[-1], ast.Starred)
    }
)


def test_each_heading_has_a_message_its_cause_and_what_to_do() -> None:
    assert len(SECTIONS) == PAGE.count("\n### ")  # no heading stands twice
    for heading, text in SECTIONS.items():
        assert re.fullmatch(
            r"(?s)\nYou see(?: \(.+?\))?:\n\n```text\n.+?\n```\n\n\*\*Why:\*\* \S.+?\n\n\*\*Do:\*\*\s.+?\n\n",
            text,
        ), heading
        in_order = ".*?".join(map(re.escape, re.findall(r"[\w'():*]+", heading)))
        assert re.search(in_order, squeezed(text), re.IGNORECASE), heading


def test_the_list_at_the_top_has_all_headings() -> None:
    listed, _ = PAGE.split("## All headings\n")[1].split("\n## ", 1)
    subjects = re.findall(r"^\*\*\[(.+)\]\(#", listed, re.MULTILINE)
    assert subjects == re.findall(r"(?m)^## (.+)$", PAGE)[1:]
    assert re.findall(r"^\[(.+)\]\(#", listed, re.MULTILINE) == list(SECTIONS)


def test_lines_of_ours_are_texts_of_the_package() -> None:
    """Three words in a row of each line of mpistrat's stand so in its code."""
    code = squeezed(re.sub(r'"\s*\n\s*f?"', "", SOURCE))
    blocks = "\n".join(re.findall(r"(?s)```text\n(.*?)```", PAGE))
    lines = [line.split() for line in re.split(r"\n(?! {4})", blocks) if OURS.match(line)]
    assert len(lines) > 30
    for words in lines:
        assert any(" ".join(words[i : i + 3]) in code for i in range(1, len(words) - 2)), words


@pytest.mark.parametrize("name", dir(errors))
def test_each_error_has_its_heading(name: str) -> None:
    assert inspect.getdoc(getattr(errors, name)).endswith(f"\n\nTroubleshooting: {name}")
    if words := WORDS[name]:
        assert words in squeezed(SECTIONS[name])
        assert words in SOURCE
    else:
        assert name in SECTIONS[name]
        assert f"raise {name}" not in SOURCE


def test_the_finding_that_is_made_of_variables_has_a_heading() -> None:
    """Its text and fix come from MPI's last words."""
    (call,) = [call for _, call in CALLS if isinstance(call.args[-1], ast.Starred)]
    assert "'MPI_Init failed'" in ast.unparse(call)
    assert {*mpi_library.OUT_OF, "MPI_Init failed"} <= SECTIONS.keys()


@pytest.mark.parametrize(("heading", "words"), FINDINGS)
def test_each_finding_of_the_doctor_has_its_heading(heading: str, words: tuple[str, ...]) -> None:
    assert stand_in_order(words, squeezed(SECTIONS[heading]))


def test_the_doctors_page_ends_findings_with_their_headings() -> None:
    output = re.search(r"```text\n(.*?)```", (TOP / "docs/doctor.md").read_text(), re.DOTALL)[1]
    faults = [squeezed(part) for part in re.split(r"(?m)^(?=\S)", output) if "fix: " in part]
    assert len(faults) == 2
    for fault in faults:
        (heading,) = NAMED.findall(fault)
        assert fault.endswith(f"(docs/troubleshooting.md: {heading})")
        assert any(stand_in_order(words, fault) for each, words in FINDINGS if each == heading)


def test_headings_that_pages_name_are_there() -> None:
    named = {
        heading
        for page in [TOP / "README.md", *(TOP / "docs").rglob("*.md")]
        for heading in NAMED.findall(squeezed(page.read_text(encoding="utf-8")))
    }
    assert named - {"…"} <= SECTIONS.keys()


def test_messages_of_others_are_still_theirs() -> None:
    shown = squeezed(PAGE)
    for message, file in OF_OTHERS.items():
        source = (Path(torch.__file__).parent / file).read_text(encoding="utf-8")
        assert message in source, file
        assert message in shown
    spawn = Path(multiprocessing.__file__).with_name("spawn.py").read_text(encoding="utf-8")
    assert "An attempt has been made to start a new process before the" in squeezed(spawn)
    assert "cannot load MPI library" in (Path(mpi4py.__file__).parent / "_mpiabi.py").read_text()
