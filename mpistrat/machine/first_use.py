"""Load the names of a package when a program first uses them.

The package writes its imports under `if TYPE_CHECKING:`, where type checkers and readers find them. Python compiles
these imports but does not run them. `load_on_first_use` reads the imports from the compiled code, because the sources
may not be installed.
"""

from __future__ import annotations

import dis
import functools
import importlib
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any


def load_on_first_use(
    package: str, then: Callable[[str], None] = lambda name: None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return functions to use as `__getattr__` and `__dir__` of `package`. The second returns its `__all__`.

    Called by: the package's own `__init__`, directly, while it runs. `__getattr__` imports and returns the object of a
    name, and raises AttributeError for an unknown name.
    Args: then: called with each name, once its object is loaded; not for submodules.
    """
    imports = _imports_in(sys._getframe(1).f_code)

    def load(name: str) -> Any:
        if name not in imports:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)
        origin, original = imports[name]
        if origin == package:
            return importlib.import_module(f"{package}.{original}")
        value = getattr(importlib.import_module(origin), original)
        setattr(sys.modules[package], name, value)
        then(name)
        return value

    return load, functools.partial(getattr, sys.modules[package], "__all__")


def _imports_in(code: CodeType) -> dict[str, tuple[str, str]]:
    """Find the `from … import …` statements in `code`.

    Returns: for each name that they bind, the module and the object's name in the module.
    """
    imports, origin, original = {}, "", ""
    for instruction in dis.get_instructions(code):
        match instruction.opname:
            case "IMPORT_NAME":
                origin = instruction.argval
            case "IMPORT_FROM":
                original = instruction.argval
            case "STORE_NAME" if original:
                imports[instruction.argval] = origin, original
                original = ""
    return imports
