"""`StackRequest`: asks another process for its Python stack."""

from __future__ import annotations

import contextlib
import os
import re
import time

from mpistrat.liveness import deadlines
from mpistrat.liveness.processes import RUNS, catches, state_of


class StackRequest:
    """Asks a process for the Python frames of its main thread, by a signal that the constructor sends.

    The process must have registered the signal with faulthandler, see `observation.speak_on_signal`. The handler is in
    C, and answers even while the GIL is held. A process that does not catch the signal is not asked, because the signal
    would kill it; a stopped or dead process is not asked, either.

    Args:
        stack_signal: the signal's number; 0: do not ask.
        stacks: the path of the file to which faulthandler appends the stack.
    Attributes: sent: whether the process was asked.
    """

    def __init__(self, pid: int, stack_signal: int, stacks: str) -> None:
        self._stacks, self._before = stacks, 0  # bytes in the file before the request
        self.sent = False
        self._deadline = time.monotonic() + deadlines.OBSERVER_WAITS_FOR_STACK
        if stack_signal and state_of(pid) in RUNS and catches(pid, stack_signal):
            with contextlib.suppress(OSError):
                self._before = os.path.getsize(stacks)
                os.kill(pid, stack_signal)
                self.sent = True

    def frames(self) -> list[str]:
        """Wait for the answer, and return its frames, "train.py:33 in main", the innermost first.

        Returns: [] if the process was not asked, or does not answer within 1.5 s after the request.
        """
        answer = ""
        while self.sent:
            before, answer = answer, self._answer()
            # A process without a core may stop in the middle of its answer. Read the file before a look at the
            # deadline, because the observer may have waited for other processes until now.
            is_complete = answer == before and bool(_frames(answer))
            if is_complete or time.monotonic() > self._deadline:
                break
            time.sleep(deadlines.OBSERVER_SLEEPS_UNTIL_STACK)
        return _frames(answer)

    def _answer(self) -> str:
        with open(self._stacks, encoding="utf-8", errors="replace") as file:
            file.seek(self._before)
            return file.read()


def _frames(dump: str) -> list[str]:
    """Return the frames in faulthandler's output for one thread, the innermost first."""
    found = re.findall(r'^\s+File "(.*)", line (\d+) in (.*)', dump, re.MULTILINE)
    return [f"{file}:{line} in {function}" for file, line, function in found]
