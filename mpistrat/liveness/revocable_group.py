"""Communicators that outlive their ranks: User-Level Failure Mitigation (ULFM), as Open MPI 5 has it.

MPI notices a rank's death within milliseconds, but an operation fails only on ranks that wait for the dead rank itself.
Ranks that wait for other living ranks would hang. So a thread of each rank checks a hundred times a second whether a
rank has failed. It then revokes the communicator and all communicators made from it (MPI_Comm_revoke). Every rank that
waits in one of them, in MPI or in shared memory, gets an error and can go on with the survivors.

This file imports mpi4py, so it is imported only on first use: `import mpistrat` starts no MPI.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from mpistrat.errors import RankLostError
from mpistrat.liveness import deadlines

_MEANS_LOST = {MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED}


class RevocableGroup:
    """A communicator and all communicators made from it. When a rank fails, a thread of the group revokes all of them.

    Made by: `run_elastic`, again after each loss. Elsewhere communicators have no group, and a rank's death ends the
    job.

    Attributes:
        comm: the first communicator: a `FaultTolerantComm` of the communicator that was given.
        lost: whether this process knows that a rank has failed. Then operations on all communicators of the group fail,
            also on communicators that are made from them later.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = FaultTolerantComm(comm)
        self.comm.revocable_group = self
        self.lost = False
        self._members: list[FaultTolerantComm] = [self.comm]
        self._before_telling: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="mpistrat failures", daemon=True)
        self._thread.start()

    def has_lost(self) -> bool:
        """Whether a rank of the group has failed, as far as this rank's MPI knows, or a rank has revoked `comm`.

        Not collective; any thread may call it. The first call that returns True sets `lost`. Once True, always True.
        """
        if not self.lost:
            with contextlib.suppress(MPI.Exception):
                self.comm.Iprobe()  # makes MPI notice failures
            if self.comm.Is_revoked() or has_failed_rank(self.comm):
                self._lose()
        return self.lost

    def before_telling(self, action: Callable[[], None]) -> None:
        """Register `action` to be called once, on any thread, when a rank is lost, before `lost` becomes True.

        If a rank is lost already, `action` is called at once. Errors of a registered action are ignored.
        Called by: transports of GPUs. Their action aborts kernels that wait for kernels of the lost rank, because MPI
        cannot end them.
        """
        with self._lock:
            if not self.lost:
                self._before_telling.append(action)
                return
        action()

    def raise_if_lost(self) -> None:
        """Raise RankLostError if `lost` is True; else do nothing. It makes no MPI call: a waiting loop can call it."""
        if self.lost:
            raise RankLostError(
                "a rank of this communicator has failed; train() is called again on the surviving ranks"
            )

    def revoke(self) -> None:
        """Make operations on the group's communicators fail, on this rank and on all others. Not collective.

        It sets `lost` on this rank; the other ranks set it when their threads see that `comm` is revoked.
        """
        self._lose()
        with self._lock:
            for member in self._members:
                member.Revoke()

    def stop_looking(self) -> None:
        self._stop.set()
        self._thread.join()

    def adopt(self, comm: MPI.Comm) -> FaultTolerantComm:
        """Make `comm` a member of the group, and return it as a `FaultTolerantComm`; revoke it if a rank is lost.

        Called by: the members' own methods (`Dup`, `Split`, …), with the communicator that MPI has just made from the
        member. MPI.COMM_NULL is returned as a `FaultTolerantComm`, too, but does not become a member.
        """
        member = FaultTolerantComm(comm)
        member.revocable_group = self
        if comm != MPI.COMM_NULL:
            with self._lock:
                self._members.append(member)
                if self.lost:  # other ranks may wait in `comm`, or not have made it yet
                    member.Revoke()
        return member

    def free(self, member: FaultTolerantComm) -> None:
        """Remove `member` from the group, and free it unless a rank is lost. Collective, as MPI_Comm_free is."""
        with self._lock:
            self._members = [known for known in self._members if known is not member]
            lost = self.lost
        if not lost:
            MPI.Intracomm.Free(member)

    def _lose(self) -> None:
        with self._lock:
            while self._before_telling:
                with contextlib.suppress(Exception):
                    self._before_telling.pop()()
            self.lost = True

    def _look(self) -> None:
        while not self._stop.wait(deadlines.RANK_SLEEPS_WATCHING_FAILURES):
            if self.has_lost():
                self.revoke()
                return


class FaultTolerantComm(MPI.Intracomm):
    """A communicator of a revocable group. Communicators made from it (`Dup`, `Split`, …) belong to the group, too."""

    revocable_group: RevocableGroup

    def Dup(self, info: MPI.Info | None = None) -> FaultTolerantComm:  # noqa: N802
        return self.revocable_group.adopt(MPI.Intracomm(self).Dup(info))

    def Split(self, color: int = 0, key: int = 0) -> FaultTolerantComm:  # noqa: N802
        return self.revocable_group.adopt(super().Split(color, key))

    def Split_type(  # noqa: N802
        self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL
    ) -> FaultTolerantComm:
        return self.revocable_group.adopt(super().Split_type(split_type, key, info))

    def Create_group(self, group: MPI.Group, tag: int = 0) -> FaultTolerantComm:  # noqa: N802
        return self.revocable_group.adopt(super().Create_group(group, tag))

    def Free(self) -> None:  # noqa: N802
        self.revocable_group.free(self)


def revocable_group_of(comm: Any) -> RevocableGroup | None:
    """Return the revocable group of `comm`; None if `comm` has no such group, so that a rank's death ends the job."""
    return getattr(comm, "revocable_group", None)


def has_failed_rank(comm: MPI.Intracomm) -> bool:
    """Whether this rank's MPI knows that a rank of `comm` has failed."""
    failed = comm.Get_failed()
    try:
        return failed.Get_size() > 0
    finally:
        failed.Free()


def means_rank_lost(error: BaseException | None) -> bool:
    """Whether `error`, or an error in its chain of causes and contexts, says that a rank has failed.

    Such errors are RankLostError and MPI's ERR_PROC_FAILED, ERR_PROC_FAILED_PENDING and ERR_REVOKED. False for None.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, RankLostError):
            return True
        if isinstance(error, MPI.Exception) and error.Get_error_class() in _MEANS_LOST:
            return True
        error = error.__cause__ or error.__context__
    return False
