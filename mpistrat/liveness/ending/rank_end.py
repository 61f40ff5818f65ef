"""Ends the job when this rank fails, from `import mpistrat` on: also before MPI runs and before a strategy is built.

An uncaught exception, or an exit code other than 0, ends all processes of the job. Once a strategy is built under
MPI_THREAD_MULTIPLE, `JobEnd` decides about exit codes.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import os
import sys
import threading
import time
from traceback import format_exception_only
from types import TracebackType
from typing import Any, NoReturn

from mpistrat.cluster_resolver.launcher import certain_rank, why_not_fault_tolerant
from mpistrat.cluster_resolver.launcher_abort import abort_by_launcher
from mpistrat.errors import CollectiveMismatchError, DivergenceError, StallError, TopologyError
from mpistrat.liveness import deadlines
from mpistrat.liveness.bounded_waits import soon, within
from mpistrat.liveness.call_site import FRAME
from mpistrat.liveness.ending.interrupts import ignore_interrupts, is_interactive
from mpistrat.liveness.ending.program_exit import exit_status, program_exit, remember_exits
from mpistrat.liveness.error_text import advice_for, of_the_program
from mpistrat.liveness.observer import observation
from mpistrat.liveness.observer.failure_detector import find_ranks
from mpistrat.liveness.observer.stderr_proxy import say_on_launcher
from mpistrat.liveness.processes import launched
from mpistrat.liveness.records.failure_log import OF_ANOTHER_RANK, FailureLog, Nodes, as_of_any_rank
from mpistrat.liveness.records.record import ENDING, LEFT, SEEN
from mpistrat.machine.notices import say
from mpistrat.settings import full_tracebacks

_OF_ALL_RANKS = (CollectiveMismatchError, DivergenceError, TopologyError)


class RankEnd:
    """Prints why this process ends its job, and ends it. `rank_end()` returns the process's only object.

    Attributes:
        rank: this rank's number in the job; 0 if neither MPI nor a launcher has numbered it.
        who: a description of this rank for messages: "rank 1 of 4 (node7, pid 3243)".
        streams: streams that `flush` flushes with standard output and stderr.
        decides_exits: whether this object ends the job after an exit code other than 0; False once `JobEnd` decides.
        other_nodes: the job's other nodes; None before a strategy is built, and in a job on one node.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        mpi = _running_mpi()  # COMM_WORLD numbers ranks as the launcher does
        world: tuple[int, int] | None = None
        if mpi:
            world = (mpi.COMM_WORLD.rank, mpi.COMM_WORLD.size)
        self.rank, self._size = world or certain_rank() or (0, 1)
        node = os.uname().nodename
        self.who = f"rank {self.rank} of {self._size} ({node}, pid {self._pid})"
        self.streams: list[Any] = []
        self.decides_exits = True
        self.other_nodes: Nodes | None = None
        self._excepthook: Any = None
        self._is_failing = False

    def catch_exceptions(self) -> None:
        """Install a `sys.excepthook` that ends the job after an uncaught exception.

        The method does nothing in an interactive program, or if the hook is in place. Call it again if the program may
        have set another hook since. The hook calls the previous hook, too. It does nothing else for an error that does
        not end the program, and in a process that is no rank.
        """
        previous = sys.excepthook
        if previous is self._excepthook or is_interactive():
            return

        def excepthook(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            # A program may call the hook itself, with an error that it has caught: `sys.last_value` is another error.
            ends_the_program = getattr(sys, "last_value", None) is error
            if self._is_failing or not (ends_the_program and self._is_the_rank()):
                previous(kind, error, trace)
                return
            self._is_failing = True
            code = 130 if issubclass(kind, KeyboardInterrupt) else 1
            of_torch = str(getattr(previous, "__module__", "")).startswith("torch.")
            # Torch's hook is Python's, with the rank before each line.
            if previous is sys.__excepthook__ or of_torch:
                # The text is written in one piece: other ranks may write at the same time.
                text = io.StringIO()
                with contextlib.redirect_stderr(text):
                    previous(kind, error, trace)
                with ignore_interrupts():  # a launcher may pass on Ctrl-C twice
                    self.end_job_for(error, text.getvalue(), code)
            # This comes first: a hook of the program may end the process or the job itself.
            self._is_ending()
            self.say_last(f"{self.who} failed; ending the job")
            try:
                previous(kind, error, trace)
            except SystemExit as end:
                code = exit_status(end.code)
            self.abort(code)

        self._excepthook = sys.excepthook = excepthook

    def catch_exits(self) -> None:
        """Make an exit code other than 0 end the job, unless all ranks exit together within 1 s.

        It replaces `sys.exit` and `os._exit` by functions that remember or announce the exit, and registers an atexit
        handler. It does nothing in an interactive program.
        """
        if is_interactive():
            return
        remember_exits()
        announce_exits()
        atexit.register(self._leave)

    def end_job(self, text: str, code: int) -> NoReturn:
        """Print `text`, and end all processes of the job with exit code `code`."""
        self._is_ending()  # first: the observer need not explain deaths
        self.say_last(text)
        self.abort(code)

    def end_job_for(self, error: BaseException, traceback: str, code: int) -> NoReturn:
        """Print that this rank failed with `error`, unless another rank has printed the same error; then end the job.

        If another rank has printed the same frames with another message, only the message is printed. One rank of the
        job also prints the summary of the errors and the advice of `advice_for`.

        Args:
            traceback: the text of the traceback of `error`.
            code: the job's exit code.
        """

        @functools.cache
        def say_it(frames_are_said: bool = False) -> None:
            self._is_ending()  # first: the observer need not explain deaths
            if frames_are_said and not full_tracebacks():
                message = "".join(format_exception_only(error))
                self._say_last(f"mpistrat: {self.who} failed at the same line: {message}")
            else:
                self.say_last(f"{self.who} failed; ending the job\n{traceback}")

        traceback = of_the_program(traceback)
        observed = observation.current
        summary = "" if isinstance(error, KeyboardInterrupt) else advice_for(error, self.rank)
        try:
            if observed is None:
                say_it()
            else:
                log = FailureLog(observed.folder.path, self.rank, self._size, self.other_nodes)
                word, is_common = _known_as(error, traceback, self.rank)
                waits = word == OF_ANOTHER_RANK or (is_common and self.rank)
                log.add(word, say_it, deadlines.RANK_WAITS_FOR_RANK_TO_PRINT if waits else 0.0)
                self._is_ending()
                summary = log.sum_up(summary)
        except (OSError, ValueError):  # the log has no space left, or a line of it is half written
            say_it()
        self._say_last(summary)
        self.abort(code)

    def say_last(self, text: str) -> None:
        """Print `text` before this process ends: on its stderr, else by the observer, else on the launcher's stderr."""
        self._say_last(f"\nmpistrat: {text}\n")

    def _say_last(self, text: str) -> None:
        if not (say(text, last=True) or observation.say(text)):
            say_on_launcher(self._pid, text)

    def abort(self, code: int) -> NoReturn:
        """End all processes of the job with exit code `code` (1 for 0), this process included.

        It flushes the streams, and calls MPI_Abort. Before MPI runs, it asks the launcher to end the job. Under a fault
        tolerant MPI, this process exits, and the launcher ends the job because of the exit code.
        """
        self._is_ending()
        self.flush()
        # MPICH's launcher drops output that it has not read by then.
        time.sleep(deadlines.RANK_WAITS_FOR_LAUNCHER_TO_READ)
        # A program without a strategy has not listed MPI's files yet.
        observation.remember_mappings()
        mpi = _running_mpi()
        in_main_thread = threading.current_thread() is threading.main_thread()
        if mpi is None:
            abort_by_launcher(code)
        elif not why_not_fault_tolerant(mpi.Get_library_version()):
            # After MPI_Abort, a fault tolerant mpirun (PRRTE 3.0) sometimes waits for ever for a lock that it has
            # freed. An exit code other than 0 ends the job there, too.
            os._exit(code or 1)
        elif in_main_thread or mpi.Query_thread() == mpi.THREAD_MULTIPLE:
            mpi.COMM_WORLD.Abort(code)
            # MPI_Abort of MPICH returns once it has told the launcher, before the launcher kills this process.
            time.sleep(deadlines.RANK_WAITS_FOR_LAUNCHER_TO_KILL)
        os._exit(code or 1)

    def is_running(self) -> bool:
        """Whether this process is the rank (no fork of it) and has not called MPI_Finalize."""
        mpi = sys.modules.get("mpi4py.MPI")
        return os.getpid() == self._pid and not (mpi and mpi.Is_finalized())

    def _is_the_rank(self) -> bool:
        """Whether the job is to end when this process fails.

        Returns: False in an interactive program, in a fork, and after MPI_Finalize. Also False if the launcher runs a
            script that has started this process, and MPI has not started, because the script may go on. If the script
            fails, the observer reports this process.
        """
        if hasattr(sys, "ps1") or not self.is_running():
            return False
        return not launched(self._pid)[0] or _running_mpi() is not None

    def flush(self) -> None:
        within(deadlines.RANK_WAITS_FOR_ITS_STREAMS, self._flush)

    def _flush(self) -> None:
        for stream in (sys.stdout, sys.stderr, *self.streams):
            # The stream may be closed, None, or any object of the program.
            with contextlib.suppress(Exception):
                stream.flush()

    def _is_ending(self) -> None:
        if observed := observation.current:
            observed.record.state = ENDING

    def _leave(self) -> None:
        """At exit, end the job if this rank failed, or if its exit code is not 0 and not all ranks exit within 1 s.

        It does nothing if `JobEnd` decides about exits. Called by: Python, as an atexit handler.
        """
        if not (self.decides_exits and self._is_the_rank()):
            return
        end = program_exit()
        if observed := observation.current:
            observed.record.end = end.how
        if end.failed or (end.code and not self._all_exit()):
            self.end_job(f"ending the job: {self.who} {end.how}", end.code)

    def _all_exit(self) -> bool:
        """Whether the programs of all ranks of the job end within 1 s, as when all call sys.exit(2). It waits for that.

        It reads the records of this node's ranks, after it has set this rank's to LEFT. False if the job has ranks on
        other nodes, or if this process has no record in a job's folder.
        """
        observed = observation.current
        if observed is None:
            return False
        observed.record.state = LEFT
        path = observed.folder.path

        def all_are_gone() -> bool:
            return sum(rank.is_gone for rank in find_ranks(path)) == self._size

        return soon(all_are_gone, deadlines.RANK_WAITS_FOR_JOINT_EXITS)


def announce_exits() -> None:
    """Replace `os._exit` by a function that announces an exit with code 0 to the observer, and then exits.

    Without the announcement MPICH's launcher returns 0 even if other ranks have not finished. The function waits until
    the observer has seen that all ranks of the node exit, at most 1 s. A second call changes nothing.
    """
    original = os._exit
    if getattr(original, "is_announced", False):
        return

    @functools.wraps(original)
    def exit_once_announced(status: int) -> NoReturn:
        try:
            if status == 0 and (observed := observation.announce_exit()):
                # A launcher kills the other ranks as soon as one has ended without MPI_Finalize. So this rank waits
                # until the observer has seen that all ranks exit.
                ranks = find_ranks(observed.folder.path)
                soon(
                    lambda: all(rank.record.exits == SEEN or rank.is_gone for rank in ranks),
                    deadlines.RANK_WAITS_FOR_JOINT_EXITS,
                    sleeps_at_most=deadlines.SOON_SLEEPS,
                )
        finally:
            original(status)

    exit_once_announced.is_announced = True  # type: ignore[attr-defined]
    setattr(os, original.__name__, exit_once_announced)


def _known_as(error: BaseException, traceback: str, own: int) -> tuple[str, bool]:
    """Return the word that stands for `error` in the log of errors, and whether all ranks raise this error.

    Ranks that have the error in common have the same word, or a word with a part in common, see `FailureLog.add`. The
    third part stands for the frames of the traceback.
    Args: own: this rank's number in the job.
    """
    of_all = isinstance(error, _OF_ALL_RANKS) and not error.__cause__
    if getattr(error, "raised_by_rank", "") and not error.__cause__:
        return OF_ANOTHER_RANK, of_all
    if isinstance(error, StallError):
        # The messages differ: each rank gives the seconds that it has waited.
        return type(error).__name__, True
    if of_all and isinstance(error, CollectiveMismatchError):
        return type(error).__name__, of_all  # the tracebacks differ
    # In their messages, all ranks may name the same rank, or each rank may name itself.
    words = [as_of_any_rank(traceback, rank) for rank in (-1, own)]
    frames = str(FRAME.findall(traceback))
    return ".".join([*words, as_of_any_rank(frames, -1)]), of_all


@functools.cache
def rank_end() -> RankEnd:
    """Return this process's `RankEnd`; the first call makes it."""
    return RankEnd()


def begin() -> None:
    """End the job from now on when this rank fails, if a launcher has started this process as a rank; else do nothing.

    It starts no MPI and raises nothing.   Called by: the package when it is imported, and the code that starts MPI.
    """
    if observation.begin():
        rank_end().catch_exceptions()
        rank_end().catch_exits()


def _running_mpi() -> Any:
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi and mpi.Is_initialized() and not mpi.Is_finalized():
        return mpi
    return None
