"""Which worker executes what runs on this thread."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

_worker: contextvars.ContextVar[int | None] = contextvars.ContextVar("worker", default=None)


@contextlib.contextmanager
def executing(worker: int) -> Iterator[None]:
    """For the time of a closure, or of making a dataset, on this worker."""
    token = _worker.set(worker)
    try:
        yield
    finally:
        _worker.reset(token)


def experimental_get_current_worker_index() -> int:
    """The number, from 0, of the worker that runs this. Raises: RuntimeError outside scheduled functions."""
    worker = _worker.get()
    if worker is None:
        raise RuntimeError(
            "experimental_get_current_worker_index was called outside a function that ClusterCoordinator.schedule sent "
            "to a worker, and outside a dataset function of create_per_worker_dataset"
        )
    return worker
