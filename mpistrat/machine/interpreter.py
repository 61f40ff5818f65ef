"""The Python interpreter that helper processes run."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

_PACKAGE = str(Path(__file__).absolute().parents[1])
# mpistrat's own __init__ would load NumPy: a helper gets an empty package with the same folder.
IMPORT_WITHOUT_INIT = f"""
import sys, types
package = types.ModuleType("mpistrat")
package.__path__ = [{_PACKAGE!r}]
sys.modules["mpistrat"] = package
"""


def python_of_helpers() -> str | None:
    """Return the path of this process's Python interpreter; None if helper processes cannot run it.

    Called by: `start_observer`, and `init_deadline`, the time limit of MPI_Init. If the result is None, they start no
        helper process: there is no observer, and no limit.
    Returns: None in a frozen program, because its executable would start the program again; and if the executable is
        not named python or pypy, or cannot be run.
    """
    executable = sys.executable or ""
    is_python = re.match(r"(python|pypy)", os.path.basename(executable))
    is_frozen = getattr(sys, "frozen", False)
    if is_python and not is_frozen and os.access(executable, os.X_OK):
        return executable
    return None
