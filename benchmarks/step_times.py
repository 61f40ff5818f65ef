"""Runs a program, and writes how long its steps took: `step_times.py FOLDER BACKWARDS PROGRAM [ARGUMENT…]`.

FOLDER gets a file of JSON for each process: the seconds of each step, from its first backward() to that of the next.
BACKWARDS is how many a step has.
"""

import atexit
import itertools
import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support import torchvision_operators

_backward = torch.Tensor.backward
_began: list[float] = []


def backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    _began.append(time.perf_counter())
    _backward(self, *args, **kwargs)


def main() -> None:
    folder = Path(sys.argv[1])
    backwards = int(sys.argv[2])
    del sys.argv[:3]
    torchvision_operators.declare_when_imported()
    torch.Tensor.backward = backward  # type: ignore[method-assign]

    @atexit.register
    def write() -> None:
        steps = _began[::backwards]
        durations = [ended - began for began, ended in itertools.pairwise(steps)]
        (folder / f"{os.getpid()}.json").write_text(json.dumps(durations), encoding="utf-8")

    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
