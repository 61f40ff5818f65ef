"""Ranges in what torch.profiler records, while it records."""

from __future__ import annotations

import sys
from typing import Any


def begin(name: str) -> Any:
    """Open a range "mpistrat::name" on this thread, for `end`; None where no profiler records."""
    profiler = sys.modules.get("torch.autograd.profiler")
    # Torch's own code asks this way, too: without a profiler a record_function costs 2 us.
    if profiler is None or not profiler._is_profiler_enabled:
        return None
    shown = profiler.record_function(f"mpistrat::{name}")
    shown.__enter__()
    return shown


def end(shown: Any) -> None:
    if shown is not None:
        shown.__exit__(None, None, None)
