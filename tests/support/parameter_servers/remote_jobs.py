"""Strategies with parameter servers inside tests, one after the other in one MPI job. Every rank calls these."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from mpi4py import MPI

import mpistrat as ms


@contextlib.contextmanager
def strategy_on_servers(make: Callable[[], ms.Strategy]) -> Iterator[Any]:
    """The strategy that `make` makes, where the program goes on; None on ranks whose work it was to serve, once it is
    over. After the block all ranks are together again, and the servers have left."""
    strategy: Any = None
    try:
        strategy = make()
    except SystemExit as end:
        if end.code:
            raise AssertionError(f"a server ended with {end.code}") from end
    try:
        yield strategy
    finally:
        if strategy is not None:
            strategy.extended.job.done()
        MPI.COMM_WORLD.Barrier()


@functools.cache
def group_of(ranks: tuple[int, ...]) -> MPI.Intracomm:
    """A communicator of these ranks. Called by: them alone."""
    world = MPI.COMM_WORLD.Get_group()
    return MPI.COMM_WORLD.Create_group(world.Incl(ranks), tag=sum(1 << rank for rank in ranks))


def workers_of(strategy: ms.Strategy) -> MPI.Intracomm:
    """The ranks that train, beside their servers. Called by: them alone."""
    return group_of(tuple(sorted(strategy.extended.job.trainers)))  # type: ignore[attr-defined]
