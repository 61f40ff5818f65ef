"""XLA devices. Importing this package loads neither torch nor torch_xla, which `runtime` alone imports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpistrat.arrays import device_kinds

if TYPE_CHECKING:
    from mpistrat.xla.runtime import Runtime

_runtime: Runtime | None = None


def start() -> Runtime:
    """The process's one XLA runtime; the first call makes it, and with it the first use of its devices.

    Raises: ImportError where torch_xla is missing or made for another torch; RuntimeError where it finds no device.
    """
    global _runtime
    if _runtime is None:
        from mpistrat.xla.runtime import Runtime

        device_kinds["xla"] = _runtime = Runtime()
    return _runtime


def is_started() -> bool:
    """Whether this process has used XLA's devices through `start`."""
    return _runtime is not None
