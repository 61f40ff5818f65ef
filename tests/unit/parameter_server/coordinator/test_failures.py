"""Errors of closures, as the chief gets them; the workers are threads."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from mpistrat.coordinator import ClusterCoordinator
from mpistrat.parameter_server.coordinator.failures import WorkerTraceback
from support.parameter_servers.coordinated_threads import Threads

Start = Callable[..., Threads]


class CustomError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")
        self.first = first


class NoSuchFile(OSError):
    def __init__(self, *, name: str) -> None:
        super().__init__(2, "no such file", name)


class Wrong(UnicodeDecodeError):
    def __init__(self, reason: str) -> None:
        super().__init__("utf-8", b"abc", 0, 1, reason)


class NotRead(Exception):
    def __reduce__(self) -> Any:
        return int, ("not a number",)


def test_errors_keep_their_class_and_tell_the_workers_stack(start: Start) -> None:
    class Mine(ValueError):
        pass

    def broken() -> None:
        raise Mine("text")

    value = start(1).coordinator.schedule(broken)
    with pytest.raises(Mine, match="text") as caught:
        value.get()
    assert isinstance(caught.value.__cause__, WorkerTraceback)
    text = str(caught.value.__cause__)
    assert text.startswith("on worker 0 (rank 1):\nTraceback")
    assert "in broken\n" in text
    assert "_execute" not in text


def raised_by(coordinator: ClusterCoordinator, make: Callable[[], Exception]) -> Exception:
    """What the chief gets."""

    def broken() -> None:
        raise make()

    value = coordinator.schedule(broken)
    with pytest.raises(Exception) as caught:  # noqa: PT011
        value.get()
    with pytest.raises(type(caught.value)):
        coordinator.join()  # which raises it once, too
    text = str(caught.value.__cause__)
    assert text.startswith("on worker 0 (rank 1):\nTraceback")
    assert "in broken\n" in text
    return caught.value


def test_errors_whose_class_is_made_by_other_arguments(start: Start) -> None:
    class Local(CustomError):
        def __init__(self, third: int) -> None:
            super().__init__(third, third)

    coordinator = start(1).coordinator
    error = raised_by(coordinator, lambda: CustomError(1, 2))
    assert isinstance(error, CustomError)
    assert (str(error), error.first) == ("1 and 2", 1)
    error = raised_by(coordinator, lambda: Local(3))
    assert isinstance(error, Local)
    assert (str(error), error.first) == ("3 and 3", 3)
    error = raised_by(coordinator, lambda: NoSuchFile(name="x"))
    assert isinstance(error, NoSuchFile)
    assert (str(error), error.filename) == (str(NoSuchFile(name="x")), "x")
    error = raised_by(coordinator, lambda: Wrong("because"))
    assert isinstance(error, Wrong)
    assert str(error) == str(Wrong("because"))


def test_errors_that_do_not_travel(start: Start) -> None:
    coordinator = start(1).coordinator
    error = raised_by(coordinator, lambda: ValueError(threading.Lock()))
    assert type(error) is RuntimeError
    assert str(error).startswith("ValueError: <unlocked _thread.lock")
    error = raised_by(coordinator, lambda: NotRead("text"))
    assert type(error) is RuntimeError
    assert str(error) == "NotRead: text"


def test_a_closure_cannot_end_its_worker(start: Start) -> None:
    coordinator = start(1).coordinator

    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(RuntimeError, match=r"SystemExit: 3.*cannot end its worker"):
        coordinator.schedule(leave).get()
    with pytest.raises(RuntimeError, match="SystemExit"):
        coordinator.join()
    assert coordinator.schedule(lambda: 4).get() == 4
