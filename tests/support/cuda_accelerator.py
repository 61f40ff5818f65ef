"""What programs of tests/launch use of `torch.sim`, by `torch.cuda`: see `support.accelerator`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class CudaAccelerator:
    """It finds no access without order, and counts no waits."""

    Stream = torch.cuda.Stream
    stream = staticmethod(torch.cuda.stream)
    current_stream = staticmethod(torch.cuda.current_stream)
    synchronize = staticmethod(torch.cuda.synchronize)
    set_sync_debug_mode = staticmethod(torch.cuda.set_sync_debug_mode)

    def __init__(self) -> None:
        # The CPU's numbers are float32's, and so are to be the device's.
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False

    def violations(self) -> list[str]:
        return []

    def raise_violations(self, raises: bool) -> None:
        pass

    def host_waits(self) -> list[str]:
        return []

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Capture a graph; an error inside ends it."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                yield
            finally:
                with contextlib.suppress(RuntimeError):  # the body's error has ended the capture
                    graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
