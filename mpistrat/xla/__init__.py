"""XLA devices. Importing this package loads neither torch nor torch_xla; only its module `runtime` loads torch_xla."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpistrat.arrays import device_kinds

if TYPE_CHECKING:
    from mpistrat.xla.runtime import Runtime

_runtime: Runtime | None = None


def start() -> Runtime:
    """Return the process's only XLA `Runtime`. The first call makes it, and takes the process's XLA devices into use.

    Called by: `start_system`; `StartedOps` and `shutdown_tpu_system` call it when the runtime is made already.
    Raises: ImportError if torch_xla is missing or is built against another torch version; RuntimeError if XLA finds no
        device.
    """
    global _runtime
    if _runtime is None:
        from mpistrat.xla.runtime import Runtime

        device_kinds["xla"] = _runtime = Runtime()
    return _runtime


def is_started() -> bool:
    """Whether `start` has made the XLA runtime of this process."""
    return _runtime is not None
