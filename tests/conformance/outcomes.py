"""What a replayed program came to: a value, or an error that stands for the whole or for one probed field."""

from __future__ import annotations

import builtins
import json
import linecache
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import mpistrat

_LIBRARY = Path(mpistrat.__file__).parent
_TESTS = Path(__file__).parent


class CannotInterpret(Exception):
    """The driver does not know this program; the case fails, whatever it expects."""


@dataclass
class Failed:
    """The program raised `error`; `state_after` is what was seen afterwards, if that is recorded."""

    error: Exception
    state_after: Any = None


def attempt(program: Callable[[], Any]) -> Any:
    """What `program` returns, or `Failed`."""
    try:
        return program()
    except CannotInterpret:
        raise
    except Exception as error:
        return Failed(error)


def probe(program: Callable[[], Any]) -> Any:
    """One probed field, as it is recorded: `{"ok": value}` or an error."""
    outcome = attempt(program)
    return outcome if isinstance(outcome, Failed) else {"ok": outcome}


def check_error(expected: dict[str, Any], error: Exception) -> None:
    """Raise AssertionError unless `error` is one that stands for the recorded `expected`."""
    raised = f"{type(error).__name__}: {error}"
    if not expected["error_strict"]:
        complaint = why_unclear(error)
        assert complaint is None, f"expected any clear error, got {raised} ({complaint})"
        return
    name = expected["error"]
    if "OpError" in expected["error_bases"]:
        wanted = getattr(mpistrat.errors, name)
        assert isinstance(error, wanted), f"expected mpistrat.errors.{name}, got {raised}"
        return
    wanted = _python_class(name)
    # A class of our own may refine Python's; another one of Python's own is another error.
    exact = type(error) is wanted
    refined = isinstance(error, wanted) and type(error).__module__.startswith("mpistrat")
    assert exact or refined, f"expected {name}, got {raised}"


def _python_class(name: str) -> type[Exception]:
    if name == "JSONDecodeError":
        return json.JSONDecodeError
    found = getattr(builtins, name, None)
    if not (isinstance(found, type) and issubclass(found, Exception)):
        raise CannotInterpret(f"no error class of Python is called {name}")
    return found


def why_unclear(error: Exception) -> str | None:
    """Why `error` is an accident rather than an answer to the user; None if it is an answer.

    An answer is raised on purpose, by a `raise` statement of the library, or comes from the program
    itself (such as calling a method of the None that get_replica_context() returned).
    """
    if len(str(error)) < 10:
        return "its message says too little"
    frame = _innermost(error.__traceback__)
    if frame is None:
        return "it carries no traceback"
    path = Path(frame.tb_frame.f_code.co_filename)
    if path.is_relative_to(_TESTS):
        missing = isinstance(error, AttributeError) and getattr(error, "obj", None) is not None
        return "the driver found no such attribute" if missing else None
    line = linecache.getline(str(path), frame.tb_lineno).strip()
    if path.is_relative_to(_LIBRARY) and line.startswith(("raise ", "assert ")):
        return None
    return f"nothing raised it on purpose: {path.name}:{frame.tb_lineno}: {line}"


def _innermost(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback
