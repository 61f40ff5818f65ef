"""Starting the observer, and what a rank does to be observed."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from typing import TYPE_CHECKING

from mpistrat.liveness.record import RankRecord
from mpistrat.machine.interpreter import python_of_helpers
from mpistrat.machine.private_files import private

if TYPE_CHECKING:
    import subprocess

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# mpistrat's own __init__ would load NumPy: the observer gets an empty package with the same folder.
# It gives itself to init, so that a program that waits for its children does not wait for it.
_MAIN = """
import os, sys, types
if os.fork():
    os._exit(0)
package = types.ModuleType("mpistrat")
package.__path__ = [sys.argv[1]]
sys.modules["mpistrat"] = package
from mpistrat.liveness.observer import main
from mpistrat.machine.private_files import private
main()
"""

SECONDS_TO_START = 10.0

_prepared: list[subprocess.Popen[bytes]] = []  # the observer, until it observes


def prepare(environ: dict[str, str] | None = None) -> None:
    """Start the observer of this node, which then waits for `observe` or for this process's end. Once.

    It is started before MPI where that is possible: forking with MPI's network open is undefined on some.
    """
    import subprocess  # here, because it makes importing mpistrat slower

    python = python_of_helpers()
    if python is not None and not _prepared:
        command, pipe = [python, "-I", "-S", "-c", _MAIN, _PACKAGE], subprocess.PIPE
        with contextlib.suppress(OSError):  # no memory, no process: the ranks run unobserved
            _prepared.append(
                subprocess.Popen(
                    command, stdin=pipe, stdout=pipe, start_new_session=True, env=environ
                )
            )


def observe(folder: str) -> None:
    """Have the ranks observed whose records lie in `folder`, and those whose records appear there later.

    Returns once those that are there are watched: a rank that died before would leave no exit status.
    """
    import subprocess

    prepare()
    while _prepared:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            # It closes its output once it watches; the process that forked has ended before.
            _prepared.pop().communicate(os.fsencode(folder) + b"\n", timeout=SECONDS_TO_START)


def speak_on_signal(record: RankRecord, stacks: str) -> None:
    """Let others ask for this process's Python stack, even while it holds the GIL; explain fatal signals, too."""
    file = private(stacks, os.O_WRONLY | os.O_APPEND | os.O_CREAT)  # open until the process ends
    if not faulthandler.is_enabled():
        faulthandler.enable(file)
    taken = _signals_in_use()
    for number in range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1):
        if not taken >> (number - 1) & 1:
            # Of the thread that gets the signal, which is the main thread while it lives: those of threads that go on
            # meanwhile cannot be read without risking a crash.
            faulthandler.register(number, file, all_threads=False, chain=False)
            record.stack_signal = number
            return


def _signals_in_use() -> int:
    """A bit for each signal that this process catches or ignores, also by handlers that Python does not know of."""
    taken = 0
    with open("/proc/self/status", encoding="utf-8") as status:
        for line in status:
            if line.startswith(("SigCgt:", "SigIgn:")):
                taken |= int(line.split()[1], 16)
    return taken
