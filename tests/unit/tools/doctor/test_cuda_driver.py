"""What CUDA's driver tells, by a stand-in for its library: this machine need have none."""

from typing import Any

import pytest

from mpistrat.tools.doctor import cuda_driver
from mpistrat.tools.doctor.children import ChildOutput
from mpistrat.tools.doctor.facts import Driver


class Library:
    """With functions as ctypes has them; `code` is what the first one returns."""

    def __init__(self, gpus: int = 0, code: int = 0, old: bool = False) -> None:
        self.gpus, self.code = gpus, code
        setattr(self, "cuDeviceGetUuid" if old else "cuDeviceGetUuid_v2", self._name)

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self.code

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = self.gpus
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
        device._obj.value = index + 0x20
        return 0

    def _name(self, uuid: Any, device: Any) -> int:
        uuid._obj[:] = [device.value] * 16
        return 0

    def cuGetErrorString(self, code: int, text: Any) -> int:  # noqa: N802
        text._obj.value = b"in words" if code == 803 else None
        return 0


FAILED = "the question to CUDA's driver failed: "


@pytest.mark.parametrize("old", [False, True])
def test_gpus_by_their_names(old: bool) -> None:
    assert cuda_driver.driver_of(Library(2, old=old)) == Driver(True, ["20" * 16, "21" * 16])


@pytest.mark.parametrize(
    ("code", "driver"),
    [
        (100, Driver(True)),  # no device: CUDA_VISIBLE_DEVICES=, or a node without
        (803, Driver(True, error="CUDA error 803 (in words)")),
        (34, Driver(False, error="CUDA error 34 (unknown)")),
    ],
)
def test_a_driver_without_gpus(code: int, driver: Driver) -> None:
    assert cuda_driver.driver_of(Library(code=code)) == driver


@pytest.mark.parametrize(
    ("answer", "driver"),
    [
        (
            ChildOutput("", "", "killed by SIGSEGV"),
            Driver(True, error=FAILED + "killed by SIGSEGV"),
        ),
        (ChildOutput("", "a\nb\n", "exit code 1"), Driver(True, error=FAILED + "exit code 1, b")),
        (
            ChildOutput("", "", "no end within 20 s"),
            Driver(True, error=FAILED + "no end within 20 s", hangs=True),
        ),
        (ChildOutput("hello\n", "", ""), Driver(True, error=FAILED + "it tells nothing, hello")),
        (
            ChildOutput('{"installed": tr', "", ""),
            Driver(True, error=FAILED + 'it tells nothing, {"installed": tr'),
        ),
        (
            ChildOutput('hello\n{"installed": true, "gpus": ["1f"], "error": ""}\nbye', "", ""),
            Driver(True, ["1f"]),
        ),
    ],
)
def test_what_a_child_says(
    monkeypatch: pytest.MonkeyPatch, answer: ChildOutput, driver: Driver
) -> None:
    monkeypatch.setattr(cuda_driver, "ask", lambda *_: answer)
    assert cuda_driver.look() == driver


def test_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child runs, whatever the machine has."""
    monkeypatch.setattr(cuda_driver, "SECONDS_TO_ASK", 300.0)  # of a machine with much to do
    found = cuda_driver.look()
    assert not found.error or found.error.startswith(("CUDA error", "libcuda"))
