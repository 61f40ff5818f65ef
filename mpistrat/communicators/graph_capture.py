"""Graph capture (CUDA graphs): work on a stream that captures a graph does not run then, but at each replay."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from typing import Any

from mpistrat.arrays import Array, is_torch

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED, and HIP's
# For NVIDIA and AMD: the driver's library, and its function that sets a thread's capture mode.
_EXCHANGES = (
    ("libcuda.so.1", "cuThreadExchangeStreamCaptureMode"),
    ("libamdhip64.so", "hipThreadExchangeStreamCaptureMode"),
)


def is_capturing(buffer: Array) -> bool:
    """Whether the current stream of the buffer's device captures a graph; False for host buffers."""
    if not is_torch(buffer) or buffer.is_cpu:
        return False
    return bool(_question_of(buffer.device.type)())


@functools.cache
def _question_of(kind: str) -> Any:
    """Return torch's function that says whether the current stream of device kind `kind` ("cuda") captures a graph.

    Returns: `bool` if torch has no such function, as for XLA devices; `bool()` is False.
    """
    module = getattr(sys.modules["torch"], kind, None)  # None for XLA devices
    return getattr(module, "is_current_stream_capturing", bool)


def refusal(call: str, rank: int) -> RuntimeError:
    """Return, but do not raise, the error of a collective `call` while the buffer's stream captures a graph."""
    return RuntimeError(
        f"rank {rank}: {call} was called while the current stream captures a graph. The ranks agree on each collective "
        "on the host, and a replay would leave that out. Capture only forward and backward, and call the collective, "
        "or the optimizer's step that needs it, after each replay, outside torch.cuda.graph"
    )


def let_this_thread_query_events() -> None:
    """Allow this thread to query events while another thread captures a graph, by the capture mode "relaxed".

    It does nothing for other accelerators than NVIDIA's and AMD's.

    Called by: the thread that watches an accelerator's pending calls.
    """
    mode = ctypes.c_int(_RELAXED)
    for library, function in _EXCHANGES:
        with contextlib.suppress(OSError, AttributeError):  # another kind of accelerator
            getattr(ctypes.CDLL(library), function)(ctypes.byref(mode))
