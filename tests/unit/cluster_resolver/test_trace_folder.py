"""MPISTRAT_TRACE."""

import importlib
import os
from collections.abc import Iterator

import pytest

from mpistrat import settings as module
from mpistrat.settings import trace_folder


@pytest.fixture(autouse=True)
def as_in_a_new_process() -> Iterator[None]:
    importlib.reload(module)
    yield
    importlib.reload(module)


def test_nothing_is_traced_unless_a_folder_is_named() -> None:
    assert trace_folder({}) is None
    assert trace_folder({"MPISTRAT_TRACE": ""}) is None


def test_a_relative_folder_is_this_process_s() -> None:
    assert trace_folder({"MPISTRAT_TRACE": "a/b"}) == os.path.join(os.getcwd(), "a", "b")
    assert trace_folder({"MPISTRAT_TRACE": "/a/b"}) == "/a/b"


def test_programs_that_this_one_starts_are_not_traced() -> None:
    environ = {"MPISTRAT_TRACE": "/a/b", "HOME": "/"}
    assert trace_folder(environ) == "/a/b"
    assert environ == {"HOME": "/"}
    assert trace_folder(environ) == "/a/b"
