"""XLA devices. Importing this package loads neither torch nor torch_xla, which `runtime` alone imports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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

        _runtime = Runtime()
    return _runtime


def is_started() -> bool:
    """Whether this process has used XLA's devices through `start`."""
    return _runtime is not None


def to_host(tensor: Any) -> Any:
    """A tensor of an XLA device, on the host. Called by: whoever of this package needs a value inside a step, too."""
    if _runtime is None:  # the program uses torch_xla by itself
        return tensor.detach().cpu()
    return _runtime.fetch([tensor.detach()])[0]
