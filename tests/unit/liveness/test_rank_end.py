import subprocess
import sys

PROGRAM = """
import os
from mpistrat.liveness.ending import rank_end
from mpistrat.liveness.observer import observation

def no_descriptors_are_left():
    raise OSError("Too many open files")

observation.announce_exit = no_descriptors_are_left
rank_end.announce_exits()
try:
    os._exit(0)
finally:
    print("went on", flush=True)
"""


def test_os_exit_ends_the_process_whatever_happens() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
