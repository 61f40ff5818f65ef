"""Worker processes of a DataLoader beside MPI.

A forked child shares the parent's MPI state: MPICH's children have written into another process's pipe, and memory that
a network card has registered is not theirs. So workers come from a forkserver, which never knew MPI.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
from collections.abc import Iterator
from multiprocessing.context import BaseContext
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch.utils.data as data

_PARTS = ("dataset", "collate_fn", "worker_init_fn")


def worker_context(loader: data.DataLoader[Any]) -> BaseContext | str | None:
    """The user's choice, else a forkserver that has imported torch once for all workers."""
    if not loader.num_workers or loader.multiprocessing_context is not None:
        return loader.multiprocessing_context
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.utils.data"])
    return context


@contextlib.contextmanager
def starting_workers(loader: data.DataLoader[Any]) -> Iterator[None]:
    """Around what starts them. Raises: TypeError that names what could not be sent to them."""
    try:
        yield
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        for part in _PARTS if loader.num_workers else ():
            with contextlib.suppress(Exception):
                ForkingPickler.dumps(getattr(loader, part))
                continue
            raise TypeError(
                f"the DataLoader's {part} cannot be sent to its {loader.num_workers} worker processes: {error}. Define "
                "functions and classes at the top level of a module (no lambda), or use num_workers=0, or, where the "
                'network allows it, DataLoader(multiprocessing_context="fork")'
            ) from error
        raise
