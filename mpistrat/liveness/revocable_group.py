"""Communicators that outlive their ranks: User-Level Failure Mitigation (ULFM), as Open MPI 5 has it.

A rank's death is known to MPI within milliseconds, but an operation fails only on ranks that wait for the dead one
itself; others wait for these. So a thread looks a hundred times a second whether a rank has failed, and revokes the
communicator with all that were made of it: whoever waits there, in MPI or in shared memory, gets an error and can go
on among the survivors.

mpi4py is imported at the top of this file, and this file on first use: `import mpistrat` starts no MPI.
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
    """A communicator and all that were made of it, which are revoked together.

    Attributes:
        comm: the first.
        lost: whether a rank has failed. Then no operation in the group succeeds, nor in what is made of it later.
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

    def failed(self) -> list[int]:
        """The ranks that this one knows to have failed, numbered as in `comm`."""
        group, failed = self.comm.Get_group(), self.comm.Get_failed()
        try:
            return list(failed.Translate_ranks(None, group))
        finally:
            group.Free()
            failed.Free()

    def has_lost(self) -> bool:
        """Whether this rank knows that some rank has failed, or another rank does and said so."""
        if not self.lost:
            with contextlib.suppress(MPI.Exception):
                self.comm.Iprobe()  # has MPI notice failures
            if self.comm.Is_revoked() or self.failed():
                self._lose()
        return self.lost

    def before_telling(self, action: Callable[[], None]) -> None:
        """Have `action` called, on any thread, when a rank is lost, before anybody here hears of it.

        It ends what nothing else ends: kernels that wait for those of the lost rank.
        """
        with self._lock:
            if not self.lost:
                self._before_telling.append(action)
                return
        action()

    def raise_if_lost(self) -> None:
        """Raises: RankLostError. It costs as much as reading a variable."""
        if self.lost:
            raise RankLostError(
                "a rank of this communicator has failed; train() is called again with those that are left"
            )

    def revoke(self) -> None:
        """Have every operation in the group fail, here and on the other ranks. Not collective."""
        self._lose()
        with self._lock:
            for member in self._members:
                member.Revoke()

    def stop_looking(self) -> None:
        self._stop.set()
        self._thread.join()

    def adopt(self, comm: MPI.Comm) -> FaultTolerantComm:
        """Make `comm`, which was just made of a member, a member too."""
        member = FaultTolerantComm(comm)
        member.revocable_group = self
        if comm != MPI.COMM_NULL:
            with self._lock:
                self._members.append(member)
                if self.lost:  # others may not have got so far
                    member.Revoke()
        return member

    def free(self, member: FaultTolerantComm) -> None:
        """Free `member`, which is collective; once a rank is lost, leave it behind."""
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
    """A member of a revocable group; what is made of it is one, too."""

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
    """The group that `comm` is a member of. None: a rank's death ends the job."""
    return getattr(comm, "revocable_group", None)


def means_rank_lost(error: BaseException | None) -> bool:
    """Whether `error`, or an error that caused it, means that a rank has failed."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, RankLostError):
            return True
        if isinstance(error, MPI.Exception) and error.Get_error_class() in _MEANS_LOST:
            return True
        error = error.__cause__ or error.__context__
    return False
