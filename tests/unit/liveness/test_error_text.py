"""What is shown of an error, and what is advised."""

import os
import re
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._utils import ExceptionWrapper

import mpistrat as ms
from mpistrat.errors import CollectiveMismatchError, StallError
from mpistrat.liveness.error_text import advice_for, of_the_program, told_of

PACKAGE = os.path.dirname(ms.__file__)
LOADER = os.path.join(os.path.dirname(torch.__file__), "utils", "data", "_utils", "fetch.py")


def inside(file: str, line: int, function: str, call: Any) -> Any:
    """A function that calls `call` at this place."""
    names = {"call": call}
    code = "\n" * (line - 2) + f"def {function}():\n call()"
    exec(compile(code, file, "exec"), names)
    return names[function]


def missing() -> None:
    raise FileNotFoundError("no such file: img5.npy")


def error_of(call: Any) -> BaseException:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def read() -> None:
    """As a data set of the program's that torch's loader asks, which we ask."""
    at_fault = inside("/home/me/train.py", 3, "__getitem__", missing)
    inside(f"{PACKAGE}/input/x.py", 9, "reading", inside(LOADER, 54, "fetch", at_fault))()


def read_in_worker() -> None:
    try:
        read()
    except Exception:
        wrapper = ExceptionWrapper(where="in DataLoader worker process 1")
    inside(LOADER, 99, "next", wrapper.reraise)()


@pytest.mark.parametrize("call", [read, read_in_worker])
def test_frames_between_lines_of_the_program_are_left_out(
    call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = error_of(call)
    text = told_of(error, 1)
    assert text.count("Traceback") == 1
    assert 'File "/home/me/train.py", line 3, in __getitem__\n' in text
    assert (PACKAGE in text, LOADER in text) == (False, False), text
    *_, own, last = text.splitlines()
    assert own == "FileNotFoundError: no such file: img5.npy"
    assert last.startswith("mpistrat: correct ")
    assert last.endswith(" (rank 1): no such file: img5.npy.")
    monkeypatch.setenv("MPISTRAT_TRACEBACK", "full")
    assert LOADER in told_of(error, 1)


def test_an_error_of_ours_alone_is_shown_whole() -> None:
    text = (
        f'Traceback (most recent call last):\n  File "{PACKAGE}/x.py", line 1, in f\nKeyError: 1\n'
    )
    assert of_the_program(text) == text


def mismatch() -> None:
    try:
        read()
    except Exception as cause:
        error = CollectiveMismatchError("the ranks did not call the same:\n  rank 1: raised it")
        error.raised_by_rank = "train.py:3 in f (rank 1): FileNotFoundError: img5\nmore"
        raise error from cause


def test_a_mismatch_for_an_error_of_this_rank_is_that_error() -> None:
    error = error_of(mismatch)
    text = of_the_program("".join(traceback.format_exception(error)))
    assert text.count("Traceback") == 1
    assert "Mismatch" not in text
    assert text.index("in mismatch\n") < text.index("/home/me/train.py")
    assert text.endswith("\nFileNotFoundError: no such file: img5.npy")
    assert advice_for(error, 0) == (
        "mpistrat: correct train.py:3 in f (rank 1): FileNotFoundError: img5.\n"
    )


def test_an_error_of_ours_has_its_cause_and_what_to_do() -> None:
    error = error_of(lambda: ms.MultiWorkerMirroredStrategy().prepare(5))
    assert "prepare takes torch modules" in advice_for(error, 0)
    with pytest.raises(ValueError, match="Leave") as raised:
        exec(compile('raise ValueError("It is wrong. Leave it out")', f"{PACKAGE}/x.py", "exec"))
    assert advice_for(raised.value, 2).endswith(" (rank 2): It is wrong. Leave it out.\n")


def raised_in_package(text: str) -> BaseException:
    return error_of(lambda: exec(compile(f"raise ValueError({text!r})", f"{PACKAGE}/x.py", "exec")))


def test_a_message_in_several_lines_becomes_one() -> None:
    folded = (
        "weight differs.\n  rank 1: 3\nRestore it. If the\ndifference comes back, test\nthe memory."
    )
    assert advice_for(raised_in_package(folded), 0).endswith(
        " (rank 0): weight differs. rank 1: 3 … If the difference comes back, test the memory.\n"
    )
    listed = "2 ranks were started (a).\nFix, one of:\n  - start;\n  - uninstall."
    assert advice_for(raised_in_package(listed), 0).endswith(
        " (rank 0): 2 ranks were started (a). … Fix, one of: - start; - uninstall.\n"
    )


def test_a_message_without_room_for_all_keeps_its_cause() -> None:
    ranks = "".join(f"\n  rank {rank}: all_reduce(sum, float32, ())" for rank in range(20))
    for message in (f"the ranks differ:{ranks}\nMake the same calls.", f"the ranks differ:{ranks}"):
        line = advice_for(raised_in_package(message), 0)
        assert " (rank 0): the ranks differ: rank 0: all_reduce(sum, float32, ()) rank 1: " in line
        assert line.endswith(" ….\n")


BARE = """
def fail(left):
    {}


def fail_in_worker(left):
    try:
        fail(left)
    except AssertionError:
        wrapper = ExceptionWrapper(where="in DataLoader worker process 1")
    wrapper.reraise()
"""


@pytest.mark.parametrize("function", ["fail", "fail_in_worker"])
@pytest.mark.parametrize(
    ("statement", "text"),
    [
        ("assert left == 3", "AssertionError: assert left == 3"),
        ("if left: assert left == 3", "AssertionError: if left: assert left == 3"),
        ("assert [\n        left] == [3]", "AssertionError: assert ["),
        ('assert left == 3, "too few"', "too few"),
        ("raise AssertionError", "AssertionError"),
    ],
)
def test_an_assert_without_a_message_shows_its_line(
    function: str, statement: str, text: str, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(BARE.format(statement), encoding="utf-8")
    names: dict[str, Any] = {"ExceptionWrapper": ExceptionWrapper}
    exec(compile(program.read_text(encoding="utf-8"), program, "exec"), names)
    error = error_of(lambda: names[function](2))
    assert advice_for(error, 0) == f"mpistrat: correct {program}:3 in fail (rank 0): {text}.\n"


def test_a_first_line_that_ends_with_a_colon_goes_on() -> None:
    error = error_of(lambda: torch.nn.Linear(2, 1).load_state_dict({}))
    assert advice_for(error, 0).endswith(
        ' state_dict for Linear: Missing key(s) in state_dict: "weight", "bias".\n'
    )


def test_a_missing_key_is_named_as_one() -> None:
    """The message of a KeyError is the key alone."""
    error = error_of(lambda: {}["loss"])
    assert advice_for(error, 0).endswith(" (rank 0): KeyError: 'loss'.\n")


def test_a_long_line_is_cut_between_words() -> None:
    assert advice_for(ValueError("another " * 99), 0).endswith(" another another ….\n")


def test_the_line_about_an_error_of_ours_ends_with_its_heading() -> None:
    """However long the line is; a class of the program's has the heading of ours that it is made from."""

    class Late(StallError): ...

    heading = "(docs/troubleshooting.md: StallError)"
    for error in (StallError("late"), Late("late"), StallError("late " * 200)):
        assert advice_for(error, 1).endswith(f" {heading}.\n")
    assert "docs/" not in advice_for(ValueError("late"), 1)


def test_an_error_that_cannot_be_read_has_an_advice_all_the_same() -> None:
    class Unreadable(Exception):
        def __str__(self) -> str:
            raise KeyError

    def fail() -> None:
        raise Unreadable

    text = told_of(error_of(fail), 0)
    assert re.search(r"\nmpistrat: correct \S+ in fail \(rank 0\): <.*failed>\.$", text)
