"""The console blocks of a page: each command is run as the page shows it, and prints what the page shows.

    Save it as `hello.py`:

    ```python
    print("hello", 1 + 1)
    ```

    ```console
    $ python hello.py
    hello …
    ```

- A block is a file if the paragraph before it says "Save it as `NAME`", or "save this one as …".
- A line that begins with `$ ` is a command. A backslash at its end takes it on to the next line. The other lines are
  its output on stdout and stderr. The two may come in any order, as they do through mpiexec.
- A line that begins with spaces goes on with the line before it: long lines are folded.
- `…` stands for any text of a line, and alone in its line for any number of lines.
"""

import contextlib
import difflib
import functools
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from support.forked.jobs import RANK
from support.forked.jobs import job as forks
from support.harness.mpi_launcher import Job, run_job

ANY = "…"
# Longer than mpistrat lets ranks wait (60 s): then its report of the ranks that wait is in the output.
SECONDS_PER_COMMAND = 90.0
_BLOCK = re.compile(r"^```([\w-]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_SAVED_AS = re.compile(r"\bsave [^.`]*\bas\s`([\w.-]+)`", re.IGNORECASE)


@dataclass(frozen=True)
class SavedFile:
    """A file that the reader saves."""

    name: str
    text: str


@dataclass(frozen=True)
class Command:
    """A command that the reader types, and the output that the page shows."""

    text: str
    output: str


def steps(page: str) -> list[SavedFile | Command]:
    """What the reader of a page does, from its top to its end. Args: page: the page's text."""
    found: list[SavedFile | Command] = []
    end = 0
    for block in _BLOCK.finditer(page):
        language, text = block.groups()
        paragraph = page[end : block.start()].rstrip().rpartition("\n\n")[2]
        end = block.end()
        if name := _SAVED_AS.search(paragraph):
            found.append(SavedFile(name[1], text))
        elif language == "console":
            found += _commands(text)
    return found


def _commands(block: str) -> Iterator[Command]:
    nothing, *parts = re.split(r"^\$ ", block, flags=re.MULTILINE)
    if nothing:
        raise ValueError(f"a console block begins with output: {nothing!r}")
    for part in parts:
        lines = part.splitlines(keepends=True)
        goes_on = [line.endswith("\\\n") for line in lines]
        end = goes_on.index(False) + 1
        text = "".join(lines[:end]).rstrip("\n")
        yield Command(text, output="".join(lines[end:]))


def run(page: Path, folder: Path, environment: Mapping[str, str]) -> list[Job]:
    """Do what a page says, in `folder`. Raises AssertionError at the first output that is another. Returns: commands.

    Each command has a shell of its own: `cd` and `export` end with their line.
    """
    jobs = []
    for step in steps(page.read_text(encoding="utf-8")):
        if isinstance(step, SavedFile):
            (folder / step.name).write_text(step.text, encoding="utf-8")
        else:
            jobs.append(_run(step, folder, environment))
    return jobs


def _run(command: Command, folder: Path, environment: Mapping[str, str]) -> Job:
    try:
        job = run_job(["bash", "-c", command.text], environment, SECONDS_PER_COMMAND, folder)
    except subprocess.TimeoutExpired as late:
        limit = f"has not ended after {SECONDS_PER_COMMAND:.0f} s"
        text = f"$ {command.text}\n{limit}:\n{late.stdout!s}{late.stderr!s}"
        raise AssertionError(text) from None
    assert is_shown(command.output, job.stdout, job.stderr), _difference(command, job)
    assert job.left_behind == (), f"$ {command.text}\nhas left processes: {job.left_behind}"
    return job


def is_shown(output: str, stdout: str, stderr: str) -> bool:
    """Whether a page's output stands for what a command has written to stdout and to stderr."""
    shown = _lines(output)
    of_stdout = _lines(stdout)
    of_stderr = _lines(stderr)

    @functools.cache
    def fits(done: int, out: int, err: int) -> bool:
        """Whether the lines of the page from `done` on stand for those of the streams from `out` and `err` on."""
        if done == len(shown):
            return (out, err) == (len(of_stdout), len(of_stderr))
        line = shown[done]
        if line == ANY and fits(done + 1, out, err):
            return True
        then = done if line == ANY else done + 1
        on_stdout = out < len(of_stdout) and _matches(line, of_stdout[out])
        if on_stdout and fits(then, out + 1, err):
            return True
        on_stderr = err < len(of_stderr) and _matches(line, of_stderr[err])
        return on_stderr and fits(then, out, err + 1)

    return fits(0, 0, 0)


def _lines(text: str) -> list[str]:
    """The lines that are not empty, each with the lines after it that begin with spaces; of spaces, one is left."""
    whole = re.sub(r"\s*\n[ \t]+", " ", text)
    return [" ".join(line.split()) for line in whole.splitlines() if line.strip()]


def _matches(shown: str, line: str) -> bool:
    return re.fullmatch(re.escape(shown).replace(ANY, ".*"), line) is not None


def _difference(command: Command, job: Job) -> str:
    """What the page shows against what was printed, as a diff."""
    sides = (command.output.splitlines(), job.output.splitlines())
    diff = difflib.unified_diff(*sides, "on the page", "printed", n=100, lineterm="")
    return "\n".join([f"$ {command.text}", *diff])


@contextlib.contextmanager
def forked_programs(folder: Path, environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """An environment whose `python` and `mpistrat` are forks of a process that has imported torch (`support.forked`).

    With `FORKED_PYTHON`, the path of this `python`, in the environment, so are the processes that they start by
    `sys.executable`.

    Args: folder: an empty folder for these two commands.
    """
    with forks() as address:
        fork = shlex.join([sys.executable, "-I", "-S", str(RANK), address])
        # The observer, for instance, starts with -I and has a Python of its own.
        its_own = f'case "$1" in -[!cm]*) exec {shlex.quote(sys.executable)} "$@";; esac'
        _make_command(folder / "python", f'{its_own}\nexec {fork} "$@"')
        _make_command(folder / "mpistrat", f'exec {fork} -m mpistrat "$@"')
        yield {**environment, "PATH": f"{folder}:{environment['PATH']}"}


def _make_command(file: Path, text: str) -> None:
    file.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    file.chmod(0o755)
