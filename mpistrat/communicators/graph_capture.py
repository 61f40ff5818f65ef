"""Graphs of an accelerator (CUDA graphs): what is submitted while one is captured runs later, and again and again."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from typing import Any

from mpistrat.arrays import Array, is_torch

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED, and HIP's
# The driver's library, which a process that uses a GPU has loaded, and its function.
_EXCHANGES = (
    ("libcuda.so.1", "cuThreadExchangeStreamCaptureMode"),
    ("libamdhip64.so", "hipThreadExchangeStreamCaptureMode"),
)


def is_capturing(buffer: Array) -> bool:
    """Whether the current stream of the buffer's device captures a graph."""
    return is_torch(buffer) and not buffer.is_cpu and bool(_question_of(buffer.device.type)())


@functools.cache
def _question_of(kind: str) -> Any:
    """The function by which the module of such devices says whether the current stream captures."""
    module = getattr(sys.modules["torch"], kind, None)  # XLA's have none
    return getattr(module, "is_current_stream_capturing", bool)


def refusal(call: str, rank: int) -> RuntimeError:
    """For a collective whose buffer's stream captures a graph."""
    return RuntimeError(
        f"rank {rank}: {call} was called while the current stream captures a graph. The ranks agree on each collective "
        "on the host, and a graph that is replayed would leave that out. Capture what is computed (forward and "
        "backward), and call the collective, or the optimizer's step that needs it, after each replay, outside "
        "torch.cuda.graph"
    )


def let_this_thread_query_events() -> None:
    """While a thread captures a graph, CUDA lets others query events only if they have said that they know of it."""
    mode = ctypes.c_int(_RELAXED)
    for library, function in _EXCHANGES:
        with contextlib.suppress(OSError, AttributeError):  # not this kind of accelerator
            getattr(ctypes.CDLL(library), function)(ctypes.byref(mode))
