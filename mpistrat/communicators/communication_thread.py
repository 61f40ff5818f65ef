"""`CommunicationThread`: a thread of each rank that makes collectives while the program goes on."""

from __future__ import annotations

import atexit
import concurrent.futures
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType

from mpistrat.communicators.communicator import Communicator
from mpistrat.liveness import deadlines
from mpistrat.liveness.call_site import SourceLine, instead
from mpistrat.liveness.ending.rank_end import rank_end
from mpistrat.machine.devices import make_own_current

_threads: dict[Communicator, CommunicationThread] = {}


def takes_a_core(on_one_node: bool, cpu_share: float, threads: int) -> bool:
    """Whether a communication thread would take a core from the rank's program and gain no time, so that none is made.

    On one node the thread moves bytes in memory, and does not sleep as it does between nodes while it waits.

    Args:
        on_one_node: whether all ranks are on one node.
        cpu_share: number of CPUs that the rank has, as `machine.cpu_share` divides them among local ranks.
        threads: number of threads with which the rank's program computes.

    Returns: True on one node if the rank has fewer than `threads` + 1 CPUs.
    """
    return on_one_node and cpu_share < threads + 1


class CommunicationThread:
    """A thread that runs submitted functions, one after the other; they make collectives while the program computes.

    MPI's nonblocking collectives on the program's own thread would proceed only while the program polls them.

    Args:
        communicator: a communicator that only this thread uses. MPI must run with MPI_THREAD_MULTIPLE.
        patience: seconds that a rank at its program's end waits for unfinished functions, because other ranks may still
            enter the same collectives. After that it ends the job.
    """

    def __init__(
        self, communicator: Communicator, patience: float = deadlines.RANK_WAITS_FOR_ITS_THREAD
    ) -> None:
        self.communicator = communicator
        self._patience = patience
        self._work: queue.SimpleQueue[
            tuple[Callable[[], None], SourceLine, Future[None]] | None
        ] = queue.SimpleQueue()  # None ends the thread
        self._pid = os.getpid()
        self._unfinished: Future[None] | None = None
        # A daemon, so that a program that ends by an error does not wait for ranks that never come.
        self._thread = threading.Thread(
            target=self._run, name="mpistrat communication", daemon=True
        )
        self._thread.start()
        atexit.register(self._check_idle)

    @classmethod
    def of_same_ranks(cls, communicator: Communicator) -> CommunicationThread:
        """Return this rank's thread for the ranks of `communicator`. The first call makes it, and is collective.

        The thread has its own communicator, split off `communicator`. All strategies over `communicator` share the
        thread, because MPI has a limited number of communicators.
        """
        if communicator not in _threads:
            _threads[communicator] = cls(communicator.split(0))
        return _threads[communicator]

    @classmethod
    def discard(cls, communicator: Communicator) -> None:
        """Forget the thread of `communicator`, if there is one, and let it end; nobody waits for its work.

        Called by: each survivor alone, when a rank has died and `communicator` moves nothing any more.
        """
        thread = _threads.pop(communicator, None)
        if thread is not None:
            thread.end()

    def end(self) -> None:
        """Let the thread end after the work submitted so far, without waiting for it. At exit, nobody waits either."""
        self._work.put(None)
        atexit.unregister(self._check_idle)

    def is_current(self) -> bool:
        """Whether the caller runs on this thread."""
        return threading.current_thread() is self._thread

    def wait_until_idle(self) -> None:
        """Wait until all submitted work has ended or failed. It does not wait if the caller runs on this thread."""
        last = self._unfinished
        if last is not None and not last.done() and not self.is_current():
            concurrent.futures.wait([last])

    def submit(self, work: Callable[[], None], frame: FrameType | SourceLine) -> Future[None]:
        """Let the thread call `work` after the work that was submitted before. It does not wait.

        If a future holds an error, this rank must submit no more work.

        Args:
            work: a function that makes collectives of this thread's communicator.
            frame: the place in the program that submitted `work`, for reports.

        Returns: a future with None when `work` has ended, or with the error that `work` raised.
        """
        done: Future[None] = Future()
        self._unfinished = done
        self._work.put((work, SourceLine(frame.f_code, frame.f_lineno), done))
        return done

    def _run(self) -> None:
        make_own_current()
        for work, place, done in iter(self._work.get, None):
            instead.place = place
            try:
                work()
            except BaseException as error:
                instead.place = None
                done.set_exception(error)
            else:
                instead.place = None
                done.set_result(None)
            del work, place, done  # `work` may hold the memory of gradients

    def _check_idle(self) -> None:
        """At exit, wait up to `patience` seconds for submitted work; if it has not ended then, end the job with code 1.

        Called by: atexit, before MPI_Finalize, because MPI_Finalize may never return while a thread is inside MPI.
        """
        last = self._unfinished
        if os.getpid() != self._pid or last is None:
            return
        if not concurrent.futures.wait([last], self._patience).done:
            end = rank_end()
            end.end_job(
                f"ending the job: {end.who} came to its end while a reduction of gradients, or another asynchronous "
                "collective, was under way without all other ranks. Every rank must make the same calls",
                1,
            )
