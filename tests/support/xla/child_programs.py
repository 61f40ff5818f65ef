"""Programs in processes of their own, which use torch_xla's CPU device and answer with one line of JSON.

They are forks of a process that has imported what torch_xla needs (`support.forked`); torch_xla they import themselves.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from support.forked.jobs import RANK
from support.forked.jobs import job as forks

SECONDS = 120.0


class Child:
    """One running program. As a context it is killed at the latest when that ends."""

    def __init__(self, program: str, environment: Mapping[str, str] = {}) -> None:
        self._forks = contextlib.ExitStack()
        address = self._forks.enter_context(forks())
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(RANK), address, "-c", program],
            env={**os.environ, "PJRT_DEVICE": "CPU", **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._forks.close()

    def answer(self) -> Any:
        """What it printed last; AssertionError if it failed, TimeoutExpired if it goes on for SECONDS."""
        stdout, stderr = self._process.communicate(timeout=SECONDS)
        assert self._process.returncode == 0, f"ended with {self._process.returncode}:\n{stderr}"
        return json.loads(stdout.splitlines()[-1])


def answer(program: str, **environment: str) -> Any:
    """Run one program to its end: what it printed last, as JSON."""
    with Child(program, environment) as child:
        return child.answer()
