"""What a job that an error has ended says: the program's traceback once, and last of all what to mend."""

import os
import re
from pathlib import Path

import mpistrat

PACKAGE = str(Path(mpistrat.__file__).parent) + os.sep
LOADERS = f"{os.sep}torch{os.sep}utils{os.sep}data{os.sep}"
MOST_LINES_ADDED = 12  # to the program's own traceback


def assert_mended_by(
    stderr: str, advice: str, *, tracebacks: int = 1, stalled: bool = False
) -> None:
    """Args: advice: a pattern of what the last line says. stalled: there is a report, too, which may be long."""
    lines = stderr.splitlines()
    # What MPI's launcher prints after it is not ours.
    ours = lines[: 1 + max(i for i, line in enumerate(lines) if line.startswith("mpistrat: "))]
    assert re.fullmatch(rf"mpistrat: correct {advice}", ours[-1].removesuffix(".")), stderr
    assert stderr.count("Traceback") == tracebacks, stderr
    assert PACKAGE not in stderr, stderr
    assert not re.search(rf'File ".*{LOADERS}', stderr), stderr
    of_the_program = r"(\[rank\d\]: )?(Traceback|  |[\w.]*(Error|Exception)\b)"
    added = [line for line in ours if not re.match(of_the_program, line)]
    assert stalled or len(added) <= MOST_LINES_ADDED * tracebacks, stderr
