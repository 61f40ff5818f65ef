"""Whether the job is traced, and where to."""

from __future__ import annotations

import os
from collections.abc import Mapping

TRACE = "MPISTRAT_TRACE"  # "traces/run1": a folder; not set or empty: nothing is traced


def trace_folder(environ: Mapping[str, str] | None = None) -> str | None:
    """The folder, as an absolute path; None where nothing is to be traced."""
    folder = (os.environ if environ is None else environ).get(TRACE)
    return os.path.abspath(folder) if folder else None
