"""The whole job ends when one of its ranks fails, or leaves while another waits for it.

An uncaught exception calls MPI_Abort. A rank that comes to its end tells the exit coordinator of each
group it is in and waits, before MPI_Finalize, until all ranks of the group have come to theirs. While it runs, a
thread looks five times a second whether this rank is stuck in a collective, and tells the exit coordinator.
The messages go over a duplicate of the group's communicator; the thread needs MPI_THREAD_MULTIPLE.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from mpi4py import MPI

from mpistrat.cluster_resolver.launcher import why_not_fault_tolerant
from mpistrat.errors import CollectiveMismatchError
from mpistrat.liveness.call_site import call_site
from mpistrat.liveness.exit_coordinator import ExitCoordinator, Left, Waits
from mpistrat.liveness.interrupts import Interrupts
from mpistrat.liveness.other_nodes import Ask, OtherNodes, Raise, Told
from mpistrat.liveness.program_exit import ProgramExit, program_exit, remember_exits
from mpistrat.liveness.record import (
    ABORT,
    CODE,
    END,
    ENDING,
    EXPENDABLE,
    LEAVING,
    LEFT,
    LIMIT,
    RAISE,
    STALLED,
    STATE,
    RankRecord,
)
from mpistrat.liveness.revocable_group import means_rank_lost, revocable_group_of

if TYPE_CHECKING:
    from mpistrat.communicators.router import Router

SECONDS_BETWEEN_LOOKS = 0.2
SECONDS_UNTIL_STUCK = 0.5
SECONDS_FOR_RANK_0 = 1.0
SECONDS_TO_BE_READ = 0.2
SECONDS_TO_BE_KILLED = 2.0
SECONDS_TO_RAISE = 2.0
SECONDS_FOR_EXIT_HANDLERS = 60.0


def watch(communicator: Router, comm: MPI.Intracomm) -> None:
    """From now on the job ends when one rank of `communicator`, whose ranks are those of `comm`, fails or leaves early.

    Collective over `comm`. Splits of `communicator` are watched with it.
    """
    global _watch
    if _watch is None:
        assert communicator.contract.watch is not None, "a group inside another is watched with it"
        _watch = _Watch(comm, communicator.contract.watch.record)
    _watch.add(communicator, comm)


class _Group:
    """Ranks that hear of each other's leaving, and the communicators within them."""

    def __init__(self, comm: MPI.Intracomm, record: RankRecord) -> None:
        self.members = comm.Get_group()
        self.revocable_group = revocable_group_of(comm)
        self.communicators: list[Router] = []
        self._comm = comm.Dup()
        self._exit_coordinator = ExitCoordinator(comm.size) if comm.rank == 0 else None
        self._unsent: list[MPI.Request] = []
        self._all_left = MPI.REQUEST_NULL
        self._stuck: dict[str, _Stuck] = {}
        self._other_nodes = OtherNodes(self._comm, record, self._tell)

    def contains(self, comm: MPI.Intracomm) -> bool:
        group = comm.Get_group()
        translated = group.Translate_ranks(None, self.members)
        group.Free()
        return MPI.UNDEFINED not in translated

    @property
    def lost(self) -> bool:
        """Whether one of the ranks has failed, and the others have gone on without this group."""
        return has_lost_a_rank(self._comm)

    def is_over(self) -> bool:
        """Whether nobody is to be waited for; called until it is true, after `leave` or `end`."""
        with _but_for_losses():
            return self.lost or self.all_left()
        return True

    def look(self, who: str) -> None:
        """Tell the exit coordinator where this rank is stuck; as the exit coordinator, hear the others and judge."""
        now = time.monotonic()
        for communicator in _with_splits(self.communicators):
            contract = communicator.contract
            call, signature = contract.calls, contract.waiting_in
            if signature is None:
                continue
            stuck = self._stuck.get(contract.name)
            if stuck is None or stuck.call != call:
                self._stuck[contract.name] = _Stuck(call, now)
            elif not stuck.told and now - stuck.since >= SECONDS_UNTIL_STUCK:
                stuck.told = True
                _flush()  # what was printed so far may be all that this rank will ever say
                collective = f"{signature}\n      at {contract.called_at}"
                self._tell(Waits(who, contract.name, call, collective))
        self._hear()

    def leave(self, who: str, end: ProgramExit) -> None:
        contracts = (one.contract for one in _with_splits(self.communicators))
        calls = {contract.name: contract.calls for contract in contracts}
        self._tell(Left(MPI.COMM_WORLD.rank, who, end.how, end.code, calls))
        self.end()

    def end(self) -> None:
        self._all_left = self._comm.Ibarrier()

    def all_left(self) -> bool:
        """Called until it is true, after `leave` or `end`."""
        self._hear()
        self._unsent = [request for request in self._unsent if not request.Test()]
        heard_all = self._exit_coordinator is None or self._exit_coordinator.all_left()
        return self._all_left.Test() and heard_all and not self._unsent

    def _tell(self, message: Left | Waits | Ask | Told | Raise, rank: int = 0) -> None:
        self._unsent = [request for request in self._unsent if not request.Test()]
        self._unsent.append(self._comm.isend(message, rank))

    def _hear(self) -> None:
        now = time.monotonic()
        while (arrived := self._comm.improbe()) is not None:
            message = arrived.recv()
            if isinstance(message, (Ask, Told, Raise)):
                self._other_nodes.hear(message)
            elif self._exit_coordinator is not None:
                self._exit_coordinator.hear(message, now)
        self._other_nodes.look(now)
        if self._exit_coordinator is None:
            return
        verdict = self._exit_coordinator.verdict(now)
        if verdict is not None:
            text, code = verdict
            end_job(f"ending the job: {text}", code)


class _Stuck:
    def __init__(self, call: int, since: float) -> None:
        self.call, self.since = call, since
        self.told = False


class _Watch:
    """What this process does for the job's end; made once."""

    def __init__(self, comm: MPI.Intracomm, record: RankRecord) -> None:
        self._pid = os.getpid()
        self.record = record
        world = MPI.COMM_WORLD  # numbered as the launcher does, whatever `comm` is
        self._who = f"rank {world.rank} of {world.size} ({socket.gethostname()}, pid {self._pid})"
        self._groups: list[_Group] = []
        self._has_left = False
        self._raises_since = 0  # ns: when this thread saw that a stall is to be raised
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if not sys.flags.interactive and not hasattr(sys, "ps1"):
            self._previous_excepthook = sys.excepthook
            sys.excepthook = self._excepthook
        if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            remember_exits()
            self._interrupts = Interrupts()
            self._thread = threading.Thread(
                target=self._look_out, name="mpistrat job end", daemon=True
            )
            self._thread.start()
            # Handlers run last in, first out, and mpi4py finalizes MPI after all of them.
            atexit.register(self._leave)
            # A program may call MPI_Finalize itself, which begins by deleting the attributes of MPI_COMM_SELF.
            keyval = MPI.Comm.Create_keyval(delete_fn=lambda *_: self._leave())
            MPI.COMM_SELF.Set_attr(keyval, self)
        elif comm.rank == 0:
            warnings.warn(
                "MPI was started without MPI_THREAD_MULTIPLE: a rank that ends while others wait for it leaves the job"
                ' hanging. Set mpi4py.rc.thread_level = "multiple" (its default) before mpi4py.MPI is imported.',
                RuntimeWarning,
                stacklevel=2,
            )

    def add(self, communicator: Router, comm: MPI.Intracomm) -> None:
        if self._thread is None:
            return
        self._groups = [group for group in self._groups if not group.lost]
        revocable_group = revocable_group_of(
            comm
        )  # a group that outlives a rank's death is not one that ends by it
        alike = (
            one
            for one in self._groups
            if one.revocable_group is revocable_group and one.contains(comm)
        )
        group = next(alike, None)
        if group is None:
            group = _Group(comm, self.record)
            self._groups.append(group)
        group.communicators.append(communicator)

    def _look_out(self) -> None:
        while not self._stop.wait(SECONDS_BETWEEN_LOOKS):
            action = self.record.words[ABORT]
            if action == END:  # the observer has reported a failure
                abort(self.record.words[CODE])
            for group in list(self._groups):
                try:
                    if not group.lost:
                        group.look(self._who)
                except MPI.Exception as error:
                    if not means_rank_lost(error) and not group.lost:
                        raise
            if action == RAISE:
                self._end_if_stuck_in_mpi()
            if self._interrupts.unanswered():
                site = call_site(sys._current_frames()[threading.main_thread().ident or 0])
                end_job(
                    f"ending the job: {self._who} was interrupted, but stays in a call at {site}",
                    130,
                )

    def _end_if_stuck_in_mpi(self) -> None:
        """No error can be raised in a thread that does not come back from MPI."""
        stalled = self.record.words[STALLED]
        inside = [one.since for one in self.record.boards() if one.since and one.group == stalled]
        entered = min(inside, default=0)
        now = time.monotonic_ns()
        self._raises_since = self._raises_since or now
        if entered and now - max(entered, self._raises_since) > SECONDS_TO_RAISE * 1e9:
            waiting = (
                one.contract for group in self._groups for one in _with_splits(group.communicators)
            )
            site = next((one.called_at for one in waiting if one.waiting_in), "an unknown place")
            end_job(f"ending the job: {self._who} cannot raise StallError inside MPI, at {site}", 1)

    def _leave(self) -> None:
        if self._has_left or os.getpid() != self._pid or MPI.Is_finalized():
            return
        self._has_left = True
        end = program_exit()
        if _leaves_together and not end.failed:
            end = ProgramExit(0, end.how)
        if end.failed:
            end_job(f"ending the job: {self._who} {end.how}", end.code)
        _flush()
        assert self._thread is not None
        try:
            self._stop.set()
            self._thread.join()
            self.record.words[STATE] = LEAVING
            waiting = [group for group in self._groups if not group.lost]
            with _but_for_losses():
                for group in waiting:
                    group.leave(self._who, end)
            pause = 0.001
            words = self.record.words
            since = time.monotonic()
            while waiting := [group for group in waiting if not group.is_over()]:
                # Others that caught a StallError may still be saving what they have.
                patience = words[LIMIT] / 1e9 if words[ABORT] == RAISE else 0.0
                if words[ABORT] and time.monotonic() - since > patience:
                    break
                time.sleep(pause)
                pause = min(pause * 1.5, 0.05)
            if words[ABORT]:
                end_job(f"ending the job: {self._who} {end.how} after a stall", end.code or 1)
            for action in _last_actions:
                action()
            self.record.words[STATE] = LEFT
            if _finalizes and any(group.lost for group in self._groups):
                os._exit(end.code)  # lost since: too late for `end_without_finalize`
        except KeyboardInterrupt:
            end_job(f"ending the job: {self._who} was interrupted", 130)
        except MPI.Exception as error:
            if not means_rank_lost(error):
                raise
            end_job(f"ending the job: a rank failed while {self._who} waited for all at its end", 1)

    def end_together(self) -> None:
        """Return when all that are left have run their exit handlers: mpirun kills them when one returns not 0."""
        if self._thread is None or os.getpid() != self._pid or MPI.Is_finalized():
            return
        end = time.monotonic() + SECONDS_FOR_EXIT_HANDLERS
        with contextlib.suppress(MPI.Exception):  # one is lost now
            waiting = [group for group in self._groups if not group.lost]
            for group in waiting:
                group.end()
            pause = 0.001
            while waiting and time.monotonic() < end:
                waiting = [one for one in waiting if not (one.lost or one.all_left())]
                time.sleep(pause)
                pause = min(pause * 1.5, 0.05)

    def _excepthook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._pid or MPI.Is_finalized() or hasattr(sys, "ps1"):
            self._previous_excepthook(kind, error, trace)
            return
        if (
            isinstance(error, CollectiveMismatchError)
            and not error.__cause__
            and MPI.COMM_WORLD.rank
        ):
            time.sleep(SECONDS_FOR_RANK_0)  # all ranks say the same: once is enough
        # Written in one piece: other ranks may write at the same time.
        text = io.StringIO()
        with contextlib.redirect_stderr(text):
            self._previous_excepthook(kind, error, trace)
        code = 130 if issubclass(kind, KeyboardInterrupt) else 1
        end_job(f"{self._who} failed; ending the job\n{text.getvalue()}", code)


def expect_losses(expected: bool) -> None:
    """Whether the death of this rank is one that the others go on without."""
    if _watch is not None:
        _watch.record.words[EXPENDABLE] = expected


def go_on_without_the_lost(has_lost: Callable[[], bool]) -> None:
    """From now on, the death of a rank does not end this program, not even while it waits for all at its end.

    Args: has_lost: whether a rank has died; MPI may hear of it later. Called by any thread.
    """
    global _has_lost
    _has_lost = has_lost


@contextlib.contextmanager
def _but_for_losses() -> Iterator[None]:
    try:
        yield
    except MPI.Exception as error:
        if _has_lost is None or not means_rank_lost(error):
            raise


def has_lost_a_rank(comm: MPI.Intracomm) -> bool:
    """Whether one of the ranks of `comm` has failed, and the others have gone on without it."""
    revocable_group = revocable_group_of(comm)
    if revocable_group is not None:
        return revocable_group.has_lost()
    if _has_lost is not None and _has_lost():
        return True
    if _finalizes and _has_lost is None:
        return False
    failed = comm.Get_failed()  # of a communicator made before
    try:
        return failed.Get_size() > 0
    finally:
        failed.Free()


def end_without_finalize() -> None:
    """From now on this program ends without MPI_Finalize, which may wait for a rank that has failed (Open MPI #11404).

    What is registered with atexit is run before, in its order, and threads are waited for, as ever.
    """
    global _finalizes
    if _finalizes:
        _finalizes = False
        # Python calls this when the main thread has come to its end: the handler is then the last to be registered,
        # and the first to be called.
        threading._register_atexit(atexit.register, _end_here)  # type: ignore[attr-defined]


def _end_here() -> NoReturn:
    """The work of Python's end, as far as a program can tell."""
    code = program_exit().code
    atexit.unregister(_end_here)
    atexit._run_exitfuncs()
    _flush()
    try:
        if _watch is not None:
            _watch.end_together()
    finally:  # also where a signal has raised: what Python does next may hang
        os._exit(code)


def also(flushed: Any, last: Callable[[], None]) -> None:
    """Flush `flushed` wherever standard output is; call `last` once all ranks have come to their ends, before
    MPI_Finalize."""
    _flushed.append(flushed)
    _last_actions.append(last)


_watch: _Watch | None = None
_leaves_together = False
_has_lost: Callable[[], bool] | None = None
_finalizes = True
_flushed: list[Any] = []
_last_actions: list[Callable[[], None]] = []


def _with_splits(communicators: list[Router]) -> Iterator[Router]:
    for communicator in list(communicators):
        yield communicator
        yield from _with_splits(communicator.splits)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr, *_flushed):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None
            stream.flush()


def leave_together() -> None:
    """All ranks have agreed to end the program now, with whatever exit code: none that does so has failed."""
    global _leaves_together
    _leaves_together = True


def abort(code: int) -> NoReturn:
    """End all processes of the job with exit code `code`."""
    if _watch is not None:
        _watch.record.state = ENDING
    _flush()
    time.sleep(SECONDS_TO_BE_READ)  # MPICH's launcher drops what it has not read by then
    if not why_not_fault_tolerant(MPI.Get_library_version()):
        # After MPI_Abort, a fault tolerant mpirun (PRRTE 3.0) now and then waits for ever for a lock that it has freed;
        # an exit code other than 0 ends the job there, too.
        os._exit(code or 1)
    MPI.COMM_WORLD.Abort(code)
    time.sleep(SECONDS_TO_BE_KILLED)  # MPICH returns once it has told the launcher
    os._exit(code)


def end_job(text: str, code: int) -> NoReturn:
    if _watch is not None:
        _watch.record.state = ENDING  # before the observer can wonder why ranks die
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"\nmpistrat: {text}\n")
    abort(code)
