"""What ended this program, as far as an atexit handler can know.

CPython forgets the SystemExit that ends a program before it runs the handlers. So this file remembers the calls of
`sys.exit`, `exit` and `quit`, and each SystemExit that passes a frame of ours. Elsewhere, `raise SystemExit(n)` looks
like the end of the script.
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

_last_exit = SystemExit(), ""  # and how it was raised


@dataclass(frozen=True)
class ProgramExit:
    """`code` is what this process will return (0 if unknown), `how` a sentence without its subject."""

    code: int
    how: str
    failed: bool = False  # by an uncaught exception, which has been printed


def remember_exits() -> None:
    """Wrap `sys.exit`, and `exit` and `quit` outside of interactive use, once."""
    if getattr(sys.exit, "remembers", False):
        return
    sys.exit = _remembering(sys.exit, "sys.exit")
    if not is_interactive():
        for name in {"exit", "quit"} & vars(builtins).keys():  # none under `python -S`
            setattr(builtins, name, _remembering(getattr(builtins, name), name))


def _remembering(original: Callable[..., NoReturn], name: str) -> Callable[..., NoReturn]:
    def exit(code: Any = None) -> NoReturn:  # the name that tracebacks show
        try:
            original(code)
        except SystemExit as error:
            argument = "" if code is None else repr(code)
            _remember(error, f"called {name}({argument}) at {call_site(sys._getframe(1))}")
            raise

    exit.__doc__ = original.__doc__
    exit.remembers = True  # type: ignore[attr-defined]
    return exit


def remember_raised(error: SystemExit) -> None:
    """Called by: a frame that `error` passes."""
    if error is not _last_exit[0]:
        _remember(error, f"raised SystemExit({error.code!r})")


def _remember(error: SystemExit, how: str) -> None:
    global _last_exit
    if threading.current_thread() is threading.main_thread():
        _last_exit = error, how


def program_exit() -> ProgramExit:
    """To be called at exit, in the main thread."""
    uncaught = getattr(sys, "last_value", None)  # also set by pytest, for exceptions that it caught
    if uncaught is not None and _ended_the_program(uncaught):
        return ProgramExit(1, f"failed with {type(uncaught).__name__}: {uncaught}", failed=True)
    last, how = _last_exit
    if _ended_the_program(last):
        return ProgramExit(exit_status(last.code), how)
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
