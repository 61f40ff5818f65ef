"""What is done once a program has loaded a library."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpistrat.machine.imports import when_loaded

NAME = "a_library_of_this_test"


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / f"{NAME}.py").write_text("VALUE = 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield NAME
    sys.modules.pop(NAME, None)


def test_actions_come_when_the_import_has_ended_in_order(library: str) -> None:
    values: list[int] = []
    for number in (10, 20):
        when_loaded(library, lambda n=number: values.append(n + sys.modules[library].VALUE))
    assert values == []
    assert library not in sys.modules
    importlib.import_module(library)
    assert values == [11, 21]
    when_loaded(library, lambda: values.append(0))
    assert values == [11, 21, 0]
    importlib.reload(sys.modules[library])
    assert values == [11, 21, 0]


def test_a_library_that_is_not_there_stays_so() -> None:
    when_loaded("no_library_of_this_name", lambda: None)
    with pytest.raises(ModuleNotFoundError, match="no_library_of_this_name"):
        importlib.import_module("no_library_of_this_name")
