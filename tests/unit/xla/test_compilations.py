"""What is told of graphs that were compiled."""

import numpy as np
import pytest

from mpistrat.xla.compilations import Compilations

SMALL, LARGE = np.zeros((2, 3), np.float32), np.zeros((4, 3), np.float32)


def step() -> None:
    pass


def test_a_first_shape_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    compilations = Compilations(0)
    for _ in range(2):  # the second finds the optimizer's state
        compilations.note(step, (SMALL,), 1)
    assert capsys.readouterr().err == ""
    assert compilations.explain() == "step: 2 graphs for float32[2,3]"


def test_each_new_shape_is_told_with_what_changed(capsys: pytest.CaptureFixture[str]) -> None:
    compilations = Compilations(3)
    compilations.note(step, ({"x": SMALL}, 1), 1)
    compilations.note(step, ({"x": LARGE}, 1), 1)
    compilations.note(step, ({"x": LARGE}, LARGE, 1), 1)
    first, second = capsys.readouterr().err.splitlines()
    assert "rank 3: step was compiled again: argument array 0 is float32[4,3], and was" in first
    assert "it got 3 arrays, and had got 2" in second
    assert compilations.explain().splitlines() == [
        "step: 1 graph for float32[2,3], int",
        "step: 1 graph for float32[4,3], int",
        "step: 1 graph for float32[4,3], float32[4,3], int",
    ]


def test_a_step_that_is_always_compiled_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    compilations = Compilations(0)
    for _ in range(6):
        compilations.note(step, (SMALL,), 1)
    (line,) = capsys.readouterr().err.splitlines()
    assert "step was compiled in 4 calls though no argument changed its shape" in line


def test_functions_of_one_name_are_not_one_step(capsys: pytest.CaptureFixture[str]) -> None:
    compilations = Compilations(0)
    for array, fn in ((SMALL, lambda x: x), (LARGE, lambda x: x + 1)):
        compilations.note(fn, (array,), 1)
    assert capsys.readouterr().err == ""


def test_a_function_that_is_made_anew_for_each_call_is_one_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    compilations = Compilations(0)
    for array in (SMALL, LARGE):
        compilations.note(lambda x: x, (array,), 1)
    assert "compiled again" in capsys.readouterr().err
