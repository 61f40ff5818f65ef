"""Which worker executes what runs on this thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class _PerThread(threading.local):
    worker: int | None = None


_per_thread = _PerThread()


@contextlib.contextmanager
def executing(worker: int) -> Iterator[None]:
    """For the time of a closure, or of making a dataset, on this worker."""
    _per_thread.worker = worker
    try:
        yield
    finally:
        _per_thread.worker = None


def experimental_get_current_worker_index() -> int:
    """The number, from 0, of the worker that runs this. Raises: RuntimeError outside scheduled functions."""
    if _per_thread.worker is None:
        raise RuntimeError(
            "experimental_get_current_worker_index was called outside a function that ClusterCoordinator.schedule sent "
            "to a worker, and outside a dataset function of create_per_worker_dataset"
        )
    return _per_thread.worker
