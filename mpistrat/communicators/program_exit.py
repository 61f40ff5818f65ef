"""What ended this program, as far as Python lets us know it from inside an atexit handler.

CPython forgets the SystemExit that ends a program before it runs the handlers. So calls of `sys.exit` are
remembered here; `raise SystemExit(n)`, `exit(n)` and the end of the script all look the same.
"""

from __future__ import annotations

import dis
import sys
import threading
from dataclasses import dataclass
from typing import Any, NoReturn

from mpistrat.communicators.call_site import call_site

_last_exit: SystemExit | None = None
_last_exit_site = ""


@dataclass(frozen=True)
class ProgramExit:
    """`code` is what this process will return (0 if unknown), `how` a sentence without its subject."""

    code: int
    how: str
    failed: bool = False  # by an uncaught exception, which has been printed


def remember_exits() -> None:
    """Wrap `sys.exit`, once."""
    if getattr(sys.exit, "remembers", False):
        return
    original = sys.exit

    def exit(status: Any = None, /) -> NoReturn:  # the name that tracebacks show
        global _last_exit, _last_exit_site
        try:
            original(status)
        except SystemExit as error:
            if threading.current_thread() is threading.main_thread():
                _last_exit, _last_exit_site = error, call_site(sys._getframe(1))
            raise

    exit.__doc__ = original.__doc__
    exit.remembers = True  # type: ignore[attr-defined]
    sys.exit = exit


def program_exit() -> ProgramExit:
    """To be called at exit, in the main thread."""
    uncaught = getattr(sys, "last_value", None)  # also set by pytest, for exceptions that it caught
    if uncaught is not None and _ended_the_program(uncaught):
        return ProgramExit(1, f"failed with {type(uncaught).__name__}: {uncaught}", failed=True)
    if _last_exit is not None and _ended_the_program(_last_exit):
        code = _last_exit.code
        how = f"called sys.exit({'' if code is None else repr(code)}) at {_last_exit_site}"
        return ProgramExit(exit_status(code), how)
    return ProgramExit(0, "came to its end (of the script, or by `raise SystemExit`)")


def exit_status(code: object) -> int:
    """The status of a process that ends by SystemExit(code)."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def _ended_the_program(error: BaseException) -> bool:
    """Whether the outermost frame that `error` is known to have passed ended by it: nobody caught it.

    Such a frame stopped at the call that raised, or raised again at the end of a `with` or `finally`.
    """
    trace = error.__traceback__
    if trace is None:
        return False
    frame = trace.tb_frame
    if frame.f_lasti == trace.tb_lasti:
        return True
    instruction, argument = frame.f_code.co_code[frame.f_lasti : frame.f_lasti + 2]
    name = dis.opname[instruction]
    return name == "RERAISE" or (name == "RAISE_VARARGS" and argument == 0)
