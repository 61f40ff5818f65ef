"""Ranges in torch.profiler, while it records."""

from __future__ import annotations

import sys
from typing import Any


def begin(name: str) -> Any:
    """Open a range "mpistrat::name" in torch's profiler on this thread.

    Returns: the open range, or None if no profiler records; the caller gives either to `end`.
    """
    profiler = sys.modules.get("torch.autograd.profiler")
    # Torch's own code makes the same test, because a record_function without a profiler costs 2 us.
    if profiler is None or not profiler._is_profiler_enabled:
        return None
    shown = profiler.record_function(f"mpistrat::{name}")
    shown.__enter__()
    return shown


def end(shown: Any) -> None:
    """Close a range that `begin` opened; nothing for None."""
    if shown is not None:
        shown.__exit__(None, None, None)
