"""Prints what the installed CuPy says of the names that the package uses. Needs neither a GPU nor a driver.

In an environment with cupy-cuda12x and nvidia-nccl-cu12 (or both of 13), with tests on PYTHONPATH:
`python record_cupy_signatures.py >cupy_signatures/cupy-cuda12x.json`. Where Cython shows a signature, it is the first
line of the docstring.
"""

import inspect
import json
from importlib import metadata
from typing import Any

import cupy
import cupy.cuda.nccl
import cupyx

from support.signatures.of_cupy import names


def text_of(name: str) -> str | None:
    """Its signature if the package calls it, "" if it takes it only; None if there is no such name."""
    value: Any = cupy if name.startswith("cupy.") else cupyx
    for attribute in name.split(".")[1:]:
        if value is cupy.cuda.Stream and not hasattr(value, attribute):
            value = cupy.cuda.Stream.null  # whose attributes __init__ sets
        if not hasattr(value, attribute):
            return None
        value = getattr(value, attribute)
    if not called[name]:
        return ""
    first_line = (inspect.getdoc(value) or "").partition("\n")[0]
    return first_line if f"{attribute}(" in first_line else f"{attribute}{inspect.signature(value)}"


called = names()
(wheel,) = metadata.packages_distributions()["cupy"]
recorded = {"wheel": wheel, "version": cupy.__version__, "names": {n: text_of(n) for n in called}}
print(json.dumps(recorded, indent=1))
