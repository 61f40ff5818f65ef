"""Questions to other programs, each with a time limit: a program may hang, crash, or be missing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

MOST_WORDS = 1 << 20  # characters that are read of an answer
_NO_END = "no end within"


@dataclass(frozen=True)
class ChildOutput:
    """What a program wrote.

    Attributes: ended: "" for exit code 0, else "exit code 1", "killed by SIGSEGV", "no end within 10 s".
    """

    output: str
    errors: str
    ended: str

    @property
    def late(self) -> bool:
        return self.ended.startswith(_NO_END)

    def json(self, begin: str) -> dict[str, Any] | None:
        """The last line that begins so, read as JSON; None where the program failed, or wrote no such line."""
        lines = [line for line in self.output.splitlines() if line.startswith(begin)]
        try:
            return None if self.ended else json.loads(lines[-1])
        except (IndexError, ValueError):
            return None

    def failure(self, silent: str) -> str:
        """Why there is no `json`: how the program ended, or `silent`; and its last words."""
        words = last_words(self.errors if self.ended else self.output, 1)
        return ", ".join(filter(None, [self.ended or silent, words]))


def ask(command: Sequence[str], seconds: float, environment: Mapping[str, str]) -> ChildOutput:
    """What `command` writes. Raises nothing, and takes no longer than `seconds`."""
    # Files, and not pipes: a process that it leaves behind could keep those open.
    with file_with(b"") as output, file_with(b"") as errors:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env=dict(environment),
                start_new_session=True,
            )
        except OSError as error:
            return ChildOutput("", "", f"it cannot be started ({error})")
        try:
            ended = how_it_ended(process.wait(seconds))
        except subprocess.TimeoutExpired:
            ended = f"{_NO_END} {seconds:g} s"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # of a process that no signal ends
            process.wait(1)
        return ChildOutput(written(output), written(errors), ended)


def file_with(content: bytes) -> IO[bytes]:
    """A file in memory that another process reads or writes. There may be no folder that can be written."""
    file = os.fdopen(os.memfd_create("mpistrat-doctor"), "w+b")
    file.write(content)
    file.seek(0)
    return file


def how_it_ended(code: int) -> str:
    """ "" for exit code 0. A negative code is a signal's, as in subprocess."""
    if code >= 0:
        return f"exit code {code}" if code else ""
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def written(file: IO[bytes]) -> str:
    """The end of a file that another process wrote."""
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), MOST_WORDS, max(0, size - MOST_WORDS)).decode(errors="replace")


def last_words(text: str, lines: int = 4) -> str:
    """The last lines that say something, as one line."""
    said = [line.strip() for line in text.splitlines() if line.strip(" -=*#\t\0")]
    return " / ".join(said[-lines:])
