"""What an atexit handler can know about the end of its program."""

import subprocess
import sys
from pathlib import Path

import pytest

HEADER = """
import atexit, contextlib, sys, threading
from mpistrat.liveness.ending.program_exit import program_exit, remember_exits
remember_exits()
remember_exits()
atexit.register(lambda: print(program_exit()))
def leave(): sys.exit(3)
"""
EXITED = "ProgramExit(code=3, how='called sys.exit(3) at {path}:7 in leave', failed=False)"
ENDED = "ProgramExit(code=0, how='came to its end (of the script, or by `raise SystemExit`)', failed=False)"


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("leave()", EXITED),
        ("with open('/dev/null'): leave()", EXITED),
        ("try: leave()\nfinally: sys.stdout.flush()", EXITED),
        ("try: leave()\nexcept SystemExit: raise", EXITED),
        ("try: leave()\nexcept SystemExit: pass", ENDED),
        ("with contextlib.suppress(SystemExit): leave()", ENDED),
        ("try:\n  try: leave()\n  except SystemExit: raise KeyError\nexcept KeyError: pass", ENDED),
        ("t = threading.Thread(target=leave); t.start(); t.join()", ENDED),
        ("try: 1 / 0\nexcept ZeroDivisionError as error: sys.last_value = error", ENDED),
        ("raise SystemExit(3)", ENDED),
        ("", ENDED),
        ("1 / 0", "ProgramExit(code=1, how='failed with ZeroDivisionError: division by zero', failed=True)"),
        ("sys.exit('no data')", "ProgramExit(code=1, how=\"called sys.exit('no data') at {path}:8 in <module>\""),
        ("sys.exit()", "ProgramExit(code=0, how='called sys.exit() at {path}:8 in <module>'"),
        ("exit(4)", "ProgramExit(code=4, how='called exit(4) at {path}:8 in <module>'"),
        ("quit(4)", "ProgramExit(code=4, how='called quit(4) at {path}:8 in <module>'"),
        ("with contextlib.suppress(SystemExit): exit(4)", ENDED),
        ("sys.exit(-1)", "ProgramExit(code=255, how='called sys.exit(-1) at"),
    ],
)  # fmt: skip
def test_how_a_program_ended(tmp_path: Path, program: str, expected: str) -> None:
    path = tmp_path / "program.py"
    path.write_text(HEADER + program)
    command = [sys.executable, "-W", "error", str(path)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.stdout.startswith(expected.format(path=path)), process.stdout + process.stderr
