"""Load the names of a package when a program first uses them.

The package writes its imports under `if TYPE_CHECKING:`, where type checkers and readers find them. Each import has
the form `from module import name as name`, so type checkers know that the name is public. Python compiles these imports
but does not run them. `load_on_first_use` reads the imports from the compiled code, because the sources may not be
installed.
"""

from __future__ import annotations

import dis
import importlib
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any


def load_on_first_use(
    package: str, then: Callable[[str], None] = lambda name: None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return two functions and a list to use as `__getattr__`, `__dir__` and `__all__` of `package`.

    The names come from the import statements in the package's `__init__`, under `if TYPE_CHECKING:`. `__getattr__`
    imports and returns the object of a name, and raises AttributeError for an unknown name.
    Called by: this `__init__`, directly, while it runs.
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

    names = sorted(imports)
    return load, names.copy, names


def _imports_in(code: CodeType) -> dict[str, tuple[str, str]]:
    """Find the `from … import …` statements in `code` under `if TYPE_CHECKING:`.

    Returns: for each name that they bind, the module and the object's name in the module.
    """
    imports: dict[str, tuple[str, str]] = {}
    origin = original = ""
    for instruction in dis.get_instructions(code):
        match instruction.opname:
            case "LOAD_NAME" if instruction.argval == "TYPE_CHECKING":
                imports.clear()  # Python runs the imports above
            case "IMPORT_NAME":
                origin = instruction.argval
            case "IMPORT_FROM":
                original = instruction.argval
            case "STORE_NAME" if original:
                imports[instruction.argval] = origin, original
                original = ""
    return imports
