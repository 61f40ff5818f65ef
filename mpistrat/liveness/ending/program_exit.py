"""The exit code of this program, and the call or error that ended it, for atexit handlers.

CPython forgets the SystemExit that ends a program before it runs the atexit handlers. So this file remembers the calls
of `sys.exit`, `exit` and `quit`, and each SystemExit that passes a frame of ours. Any other `raise SystemExit(n)` looks
like the end of the script, with exit code 0.
"""

from __future__ import annotations

import builtins
import dis
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from mpistrat.liveness.call_site import call_site
from mpistrat.liveness.ending.interrupts import is_interactive

# The last remembered SystemExit of the main thread, and a text that says how it was raised.
_last_exit = SystemExit(), ""


@dataclass(frozen=True)
class ProgramExit:
    """How a program has ended.

    Attributes:
        code: the process's exit code; 1 after an uncaught exception, 0 if it is not known.
        how: a sentence without its subject: "called sys.exit(3) at train.py:7".
        failed: whether an uncaught exception has ended the program. Python has printed it.
    """

    code: int
    how: str
    failed: bool = False


def remember_exits() -> None:
    """Replace `sys.exit` by a function that remembers the call and its line, and then exits as before.

    In a program that is not interactive, `exit` and `quit` are replaced, too. A second call changes nothing.
    """
    if getattr(sys.exit, "remembers", False):
        return
    sys.exit = _remembering(sys.exit, "sys.exit")
    if not is_interactive():
        for name in {"exit", "quit"} & vars(builtins).keys():  # `python -S` has neither
            setattr(builtins, name, _remembering(getattr(builtins, name), name))


def _remembering(original: Callable[..., NoReturn], name: str) -> Callable[..., NoReturn]:
    def exit(code: Any = None) -> NoReturn:  # the name that tracebacks show
        try:
            original(code)
        except SystemExit as error:
            argument = "" if code is None else repr(code)
            place = call_site(sys._getframe(1))
            _remember(error, f"called {name}({argument}) at {place}")
            raise

    exit.__doc__ = original.__doc__
    exit.remembers = True  # type: ignore[attr-defined]
    return exit


def remember_raised(error: SystemExit) -> None:
    """Remember a SystemExit that may end the program, unless a call of `sys.exit` has been remembered as its cause.

    Called by: `mpistrat run` and `run_elastic`, when the program's code raises `error` through them.
    """
    if error is not _last_exit[0]:
        _remember(error, f"raised SystemExit({error.code!r})")


def _remember(error: SystemExit, how: str) -> None:
    global _last_exit
    if threading.current_thread() is threading.main_thread():
        _last_exit = error, how


def program_exit() -> ProgramExit:
    """Return how this program has ended. Called by: atexit handlers, in the main thread.

    Returns: exit code 1 for an uncaught exception; the code of a remembered SystemExit that nobody has caught; else
        exit code 0, as at the end of the script.
    """
    uncaught = getattr(sys, "last_value", None)  # also set by pytest, for exceptions that it caught
    if uncaught is not None and _ended_the_program(uncaught):
        return ProgramExit(1, f"failed with {type(uncaught).__name__}: {uncaught}", failed=True)
    last, how = _last_exit
    if _ended_the_program(last):
        return ProgramExit(exit_status(last.code), how)
    return ProgramExit(0, "came to its end (of the script, or by `raise SystemExit`)")


def exit_status(code: object) -> int:
    """Return the exit code of a process that ends by SystemExit(code): 0 for None, `code & 0xFF` for an int, else 1."""
    if not isinstance(code, int | None):
        return 1
    return (code or 0) & 0xFF


def _ended_the_program(error: BaseException) -> bool:
    """Whether nobody has caught `error`, so that it ended the program. False if `error` was never raised.

    Then the outermost frame of its traceback stopped at the call that raised, or at the end of a `with` or `finally`
    that raised the error again. A frame that has caught the error has run on.
    """
    trace = error.__traceback__
    if trace is None:
        return False
    frame = trace.tb_frame
    stopped_at = frame.f_lasti
    if stopped_at == trace.tb_lasti:
        return True
    instruction, argument = frame.f_code.co_code[stopped_at : stopped_at + 2]
    name = dis.opname[instruction]
    return name == "RERAISE" or (name == "RAISE_VARARGS" and argument == 0)
