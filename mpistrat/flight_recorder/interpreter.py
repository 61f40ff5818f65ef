"""What helper processes run in."""

from __future__ import annotations

import os
import sys


def python_of_helpers() -> str | None:
    """The interpreter that helper processes run in; None where there is none but the user's program itself."""
    if getattr(sys, "frozen", False) or not sys.executable:
        return None
    return sys.executable if os.access(sys.executable, os.X_OK) else None
