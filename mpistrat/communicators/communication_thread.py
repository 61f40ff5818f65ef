"""A thread of each rank that makes collectives while the program goes on."""

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
    """Whether a communication thread would only take a core from the rank's program, and gain no time.

    On one node the thread moves bytes in memory, so it never sleeps as it would while it waits for a network.

    Args:
        on_one_node: whether all ranks are on one node.
        cpu_share: number of CPUs that the rank has, as `machine.cpu_share` divides them among local ranks.
        threads: number of threads that the rank's program computes with.

    Returns: True on one node if the rank has less than one CPU beyond its threads.
    """
    return on_one_node and cpu_share < threads + 1


class CommunicationThread:
    """A thread that runs submitted functions in order; they make collectives of a communicator that nobody else uses.

    Such collectives proceed by themselves. MPI's nonblocking collectives, on the program's thread, proceed only while
    the program polls them.

    Args:
        communicator: a communicator that only this thread uses. MPI must run with MPI_THREAD_MULTIPLE.
        patience: seconds that a program at its end waits for submitted functions, because other ranks may still join
            their collectives. After that it ends the job.
    """

    def __init__(
        self, communicator: Communicator, patience: float = deadlines.RANK_WAITS_FOR_ITS_THREAD
    ) -> None:
        self.communicator, self._patience = communicator, patience
        self._work: queue.SimpleQueue[
            tuple[Callable[[], None], SourceLine, Future[None]] | None
        ] = queue.SimpleQueue()  # None ends the thread
        self._pid = os.getpid()
        self._unfinished: Future[None] | None = None
        # A daemon: a program that ends by an error must not wait for ranks that never come.
        self._thread = threading.Thread(
            target=self._run, name="mpistrat communication", daemon=True
        )
        self._thread.start()
        atexit.register(self._check_idle)

    @classmethod
    def of_same_ranks(cls, communicator: Communicator) -> CommunicationThread:
        """Return the thread that serves the ranks of `communicator`; the first call makes it, and is collective.

        All strategies over `communicator` share the thread: a program with many strategies does not use up MPI's
        communicators.
        """
        if communicator not in _threads:
            _threads[communicator] = cls(communicator.split(0))
        return _threads[communicator]

    @classmethod
    def discard(cls, communicator: Communicator) -> None:
        """End the thread of `communicator`, if there is one, and leave its work undone.

        Called by: each rank alone, when a rank has failed and nothing moves in `communicator` any more.
        """
        thread = _threads.pop(communicator, None)
        if thread is not None:
            thread.end()

    def end(self) -> None:
        """Take no more work. The thread finishes submitted work, unless its communicator is discarded."""
        self._work.put(None)
        atexit.unregister(self._check_idle)

    def is_current(self) -> bool:
        """Whether the caller runs on this thread."""
        return threading.current_thread() is self._thread

    def wait_until_idle(self) -> None:
        """Return when all submitted work has ended or failed; at once if the caller runs on this thread."""
        last = self._unfinished
        if last is not None and not last.done() and not self.is_current():
            concurrent.futures.wait([last])

    def submit(self, work: Callable[[], None], frame: FrameType | SourceLine) -> Future[None]:
        """Queue `work` behind the work that was submitted before.

        A rank that got an error must not submit anything further.

        Args:
            work: a function that makes collectives of this thread's communicator.
            frame: the place in the program that submitted `work`, for reports.

        Returns: a future. It ends when `work` has ended, and holds the error that `work` raised.
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
        """End the job if submitted work is still under way at exit, `patience` seconds later.

        It runs before MPI_Finalize, since MPI_Finalize may never return while a thread is inside MPI.
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
