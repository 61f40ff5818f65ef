"""Whether the job is traced, and where to."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

TRACE = "MPISTRAT_TRACE"  # "traces/run1": a folder; not set or empty: nothing is traced

_taken: str | None = None


def trace_folder(environ: MutableMapping[str, str] | None = None) -> str | None:
    """The folder, as an absolute path; None where nothing is to be traced.

    The setting is remembered, and leaves the environment: a program that this one starts would take itself for a rank
    of the job, and write to the same files.
    """
    global _taken
    folder = (os.environ if environ is None else environ).pop(TRACE, None)
    if folder:
        _taken = os.path.abspath(folder)
    return _taken
