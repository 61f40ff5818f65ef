"""Run other programs with a time limit and read their output. A program may hang, crash, or be missing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from mpistrat.cluster_resolver.launcher import environment_of_children
from mpistrat.liveness.processes import name_of_signal

MOST_WORDS = 1 << 20  # bytes: only the end of a longer output is read
_NO_END = "no end within"


@dataclass(frozen=True)
class ChildOutput:
    """The output of a child program that has ended, or was killed. Made by: `ask`.

    Attributes:
        output, errors: the texts of stdout and stderr.
        ended: "" for exit code 0, else "exit code 1", "killed by SIGSEGV", "no end within 10 s". `json` returns None
            unless it is "".
    """

    output: str
    errors: str
    ended: str

    @property
    def late(self) -> bool:
        return self.ended.startswith(_NO_END)

    def json(self, begin: str) -> dict[str, Any] | None:
        """Return the last line of stdout that starts with `begin`, read as JSON.

        Returns: None if `ended` is not "", whatever was printed; None also if there is no such line, or it is no JSON.
        """
        lines = [line for line in self.output.splitlines() if line.startswith(begin)]
        try:
            return None if self.ended else json.loads(lines[-1])
        except (IndexError, ValueError):
            return None

    def failure(self, silent: str) -> str:
        """Return why `json` returned None: how the program ended, then its last line of output.

        Args: silent: the words for a program that ended with code 0 and wrote no such line.
        """
        text = self.errors if self.ended else self.output
        words = last_words(text, 1)
        return f"{self.ended or silent}, {words}".removesuffix(", ")


def ask(command: Sequence[str], seconds: float, variables: Mapping[str, str] = {}) -> ChildOutput:
    """Run `command` for at most `seconds`, then kill it and its children.

    The command cannot take the place of a rank: it has no variables of the launcher.
    Args: variables: further environment variables of the command.
    Returns: its output. It raises no error: `ended` also says why a program could not be started.
    """
    # The output goes to files. A pipe would stay open if the command left a process behind.
    with file_with(b"") as output, file_with(b"") as errors:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env={**environment_of_children(), **variables},
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
        with contextlib.suppress(subprocess.TimeoutExpired):  # no signal ends the process
            process.wait(1)
        return ChildOutput(written(output), written(errors), ended)


def file_with(content: bytes) -> IO[bytes]:
    """Return an open file in memory with `content`, for another process to read or write; it needs no folder."""
    file = os.fdopen(os.memfd_create("mpistrat-doctor"), "w+b")
    file.write(content)
    file.seek(0)
    return file


def how_it_ended(code: int) -> str:
    """Return how a process ended, in words; "" for exit code 0. A negative code is a signal, as in subprocess."""
    if code >= 0:
        return f"exit code {code}" if code else ""
    return f"killed by {name_of_signal(-code)}"


def written(file: IO[bytes]) -> str:
    """Return the text in a file that another process has written: its last 1 MiB at most."""
    size = os.fstat(file.fileno()).st_size
    end = os.pread(file.fileno(), MOST_WORDS, max(0, size - MOST_WORDS))
    return end.decode(errors="replace")


def last_words(text: str, lines: int = 4) -> str:
    """Return the last `lines` lines of `text`, joined by " / ". Empty lines and lines of dashes are left out."""
    said = [line.strip() for line in text.splitlines() if line.strip(" -=*#\t\0")]
    return " / ".join(said[-lines:])
