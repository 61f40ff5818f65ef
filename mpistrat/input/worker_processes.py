"""Worker processes of a DataLoader beside MPI.

A forked child shares its parent's MPI state: MPICH's children have written into another process's pipe, and a child
does not own the memory that a network card has registered. So worker processes come from a forkserver, which has never
started MPI.

Slurm signals all processes of a job shortly before its end. The ranks decide what to do about the signal, and need
their worker processes meanwhile. So the worker processes and the forkserver block such signals.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

import numpy as np
import torch
import torch.utils.data as data

from mpistrat.cluster_resolver.mpi import EXIT_CODE_OF_REFUSED_WORKER, GUARD_PROGRAM
from mpistrat.liveness.bounded_waits import soon

_ANNOUNCEMENTS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_SECONDS_BETWEEN_LOOKS = 1.0
_SECONDS_OF_A_DEATH = 0.5
_MOST_PROCESSES = 1 << 20  # more worker processes than a rank has


def worker_context(loader: data.DataLoader[Any]) -> BaseContext | str | None:
    """Return the program's `multiprocessing_context`, or else a forkserver for the loader's worker processes.

    The forkserver imports torch and mpistrat once for all worker processes. Returns: None if the loader has no worker
    processes and no context.
    """
    if not loader.num_workers or loader.multiprocessing_context is not None:
        return loader.multiprocessing_context
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.utils.data", __name__])
    return context


class WorkerInit:
    """A `worker_init_fn` that prepares a worker process, and then calls the `worker_init_fn` of the program's `loader`.

    Called by: torch, in each worker process at its start. A worker process of a forkserver then ends only with its
        rank, or when the rank sends it SIGTERM; it blocks Slurm's signals.

    Args: seed_id: a number of this rank alone, so that worker processes of different ranks draw different random
        numbers. 0 keeps torch's seeds.
    """

    def __init__(self, loader: data.DataLoader[Any], seed_id: int) -> None:
        self._function = loader.worker_init_fn
        self._seed_id = seed_id
        self._is_shielded = loader.multiprocessing_context is None

    def __call__(self, worker_id: int) -> None:
        if self._is_shielded:
            signal.pthread_sigmask(signal.SIG_BLOCK, _ANNOUNCEMENTS)
            rank = multiprocessing.parent_process()
            threading.Thread(target=_end_with_rank, args=(rank,), daemon=True).start()
        if self._seed_id:
            _seed_anew(self._seed_id)
        if self._function is not None:
            self._function(worker_id)


def _seed_anew(seed_id: int) -> None:
    """Seed Python, torch and NumPy in this worker process by its torch seed and `seed_id`.

    Torch's seed alone can be the same on all ranks. Seeds for different `seed_id`s differ, also modulo 2**32, the range
    that programs use for NumPy.
    """
    info = cast("Any", data.get_worker_info())
    seed = (info.seed + seed_id * _MOST_PROCESSES) % (1 << 63)
    object.__setattr__(info, "seed", seed)  # the object is frozen
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(np.random.SeedSequence(seed).generate_state(4))


def _end_with_rank(rank: BaseProcess) -> None:
    """End this worker process when its rank has ended, or has sent SIGTERM. Runs on a thread of the worker process."""
    # The process must not wait for the forkserver's end, because the forkserver waits for its worker processes. (A
    # forked child of a killed rank still holds the rank's end of the watched pipe. The rank then counts as alive.)
    while rank.is_alive():
        came = signal.sigtimedwait(_ANNOUNCEMENTS, _SECONDS_BETWEEN_LOOKS)
        if came is not None and came.si_signo == signal.SIGTERM and came.si_pid == rank.pid:
            break
    os._exit(0)


@contextlib.contextmanager
def _blocked_in_children() -> Iterator[None]:
    """A context for starting processes. The started processes, and their own children, block `_ANNOUNCEMENTS`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ANNOUNCEMENTS)
    try:
        _start_tracker()  # unblocks SIGTERM in this thread; the tracker itself ignores it
        signal.pthread_sigmask(signal.SIG_BLOCK, _ANNOUNCEMENTS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_tracker() -> None:
    """Start multiprocessing's tracker, which removes the semaphores of a killed rank. It says nothing of that.

    Two lines of each rank would follow the report of the error that ends the job.
    """
    # multiprocessing passes the options on.
    sys.warnoptions.insert(0, "ignore::UserWarning:multiprocessing.resource_tracker")
    try:
        resource_tracker.ensure_running()
    finally:
        del sys.warnoptions[0]


def guarded(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches of a DataLoader's iterator.

    Raises: RuntimeError that says how a worker process has died. If it has run the program's main script up to the
        start of MPI, and was refused, the text asks for an `if __name__ == "__main__"` guard.
    """
    try:
        yield from batches
    except (RuntimeError, EOFError, OSError):
        workers = getattr(batches, "_workers", ())

        def exit_code_of_failed() -> Any:
            for worker in workers:
                if worker.exitcode:
                    return worker.exitcode
            return 0

        # A rank may read the end of a worker's pipe before the worker's end.
        soon(exit_code_of_failed, _SECONDS_OF_A_DEATH * bool(workers))
        code = exit_code_of_failed()
        if code == 0:
            raise
        died = (
            f"process has died ({code}: an exit code, or minus a signal; the kernel sends 9 when memory runs out). "
            "With num_workers=0 this rank reads the data itself, and shows the error"
        )
        refused = f"processes could not start. {GUARD_PROGRAM}"
        how = {EXIT_CODE_OF_REFUSED_WORKER: refused}.get(code, died)
        raise RuntimeError(f"a DataLoader's worker {how}") from None


@contextlib.contextmanager
def starting_processes(loader: data.DataLoader[Any]) -> Iterator[None]:
    """A context around `iter(loader)`, where torch starts the loader's worker processes. They block Slurm's signals.

    Raises: TypeError that names the part of the loader (dataset, collate_fn or worker_init_fn) that cannot be pickled.
    """
    shield: Any = contextlib.nullcontext()
    if loader.num_workers and loader.multiprocessing_context is None:
        shield = _blocked_in_children()
    try:
        with shield:
            yield
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        if not loader.num_workers:
            raise
        for part in ("dataset", "collate_fn", "worker_init_fn"):
            with contextlib.suppress(Exception):
                ForkingPickler.dumps(getattr(loader, part))
                continue
            raise TypeError(
                f"the DataLoader's {part} cannot be sent to its {loader.num_workers} worker processes: {error}. Define "
                "functions and classes at the top level of a module (no lambda), or use num_workers=0, or, where the "
                'network allows it, DataLoader(multiprocessing_context="fork")'
            ) from None
        raise
