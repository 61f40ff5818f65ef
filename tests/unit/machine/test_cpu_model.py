"""The processor's name."""

import builtins
import io
import platform
from typing import Any

import pytest

from mpistrat.machine.cpu_model import cpu_model


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("processor\t: 0\nmodel name\t: AMD EPYC: 9654\nprocessor\t: 1\n", "AMD EPYC: 9654"),
        ("processor\t: 0\nBogoMIPS\t: 50.00\n", platform.machine()),  # on ARM
        (None, platform.machine()),
    ],
)
def test_names(monkeypatch: pytest.MonkeyPatch, content: str | None, expected: str) -> None:
    def opened(*_: Any, **__: Any) -> io.StringIO:
        if content is None:
            raise FileNotFoundError
        return io.StringIO(content)

    monkeypatch.setattr(builtins, "open", opened)
    assert cpu_model() == expected
