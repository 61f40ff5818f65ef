"""What a job that an error has ended says: the program's traceback once, and last of all what to mend."""

import os
import re
from pathlib import Path

import mpistrat

PACKAGE = str(Path(mpistrat.__file__).parent) + os.sep
TORCH = r'File ".*/torch/(utils/|nn/modules/|autograd/)'
MOST_LINES_ADDED = 12  # to the program's own traceback
MOST_LINES = 30  # with the traceback, and with the lines of MPI's launcher
# Of `launcher.run_python(forked=True)`.
FORKED = re.compile(r'  File ".*/support/forked/server.py", .*\n.*\n')


def assert_mended_by(
    stderr: str, advice: str, *, tracebacks: int = 1, stalled: bool = False
) -> None:
    """Args: advice: a pattern of what the last line says. stalled: there is a report, too, which may be long."""
    lines = stderr.splitlines()
    # What MPI's launcher prints after it is not ours.
    last = max(number for number, line in enumerate(lines) if line.startswith("mpistrat: "))
    ours = lines[: last + 1]
    assert re.fullmatch(rf"mpistrat: correct {advice}", ours[-1].removesuffix(".")), stderr
    assert stderr.count("Traceback") == tracebacks, stderr
    assert PACKAGE not in stderr, stderr
    assert not re.search(TORCH, stderr), stderr
    of_the_program = r"(\[rank\d\]: )?(Traceback|  |[\w.]*(Error|Exception)\b)"
    added = [line for line in ours if not re.match(of_the_program, line)]
    assert stalled or len(added) <= MOST_LINES_ADDED * tracebacks, stderr


def assert_short(stderr: str) -> None:
    lines = FORKED.sub("", stderr).splitlines()
    assert len(lines) <= MOST_LINES, stderr
