"""A thread of each rank for collectives that run while the program goes on."""

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
    """Whether a communication thread would only take a core from the program of a rank.

    On one node it moves bytes in memory, and never waits as it would for a network.

    Args:
        on_one_node: whether all ranks are there.
        cpu_share: the CPUs that the rank has, as `machine.cpu_share` shares them out.
        threads: with which its program computes.
    """
    return on_one_node and cpu_share < threads + 1


class CommunicationThread:
    """Runs what is submitted, in this order, in collectives of a communicator that nobody else uses.

    These collectives proceed by themselves; MPI's nonblocking ones, on the program's thread, only while it polls them.

    Args:
        communicator: of this thread only. MPI must have been started with MPI_THREAD_MULTIPLE.
        patience: seconds that the program's end waits for what is under way, in which other ranks may still take part.
    """

    def __init__(
        self, communicator: Communicator, patience: float = deadlines.RANK_WAITS_FOR_ITS_THREAD
    ) -> None:
        self.communicator, self._patience = communicator, patience
        self._work: queue.SimpleQueue[
            tuple[Callable[[], None], SourceLine, Future[None]] | None  # None: no more
        ] = queue.SimpleQueue()
        self._pid = os.getpid()
        self._unfinished: Future[None] | None = None
        # A daemon: a program that ends by an error must not wait for ranks that will never come.
        self._thread = threading.Thread(
            target=self._run, name="mpistrat communication", daemon=True
        )
        self._thread.start()
        atexit.register(self._check_idle)

    @classmethod
    def of_same_ranks(cls, communicator: Communicator) -> CommunicationThread:
        """The thread whose communicator is over the same ranks; made at the first call, which is collective.

        It serves all strategies over `communicator`: a program that makes many does not use communicators up.
        """
        if communicator not in _threads:
            _threads[communicator] = cls(communicator.split(0))
        return _threads[communicator]

    @classmethod
    def discard(cls, communicator: Communicator) -> None:
        """Nothing moves in `communicator` any more: the thread ends, and what it had to do is left."""
        thread = _threads.pop(communicator, None)
        if thread is not None:
            thread.end()

    def end(self) -> None:
        """Take no more work. What was submitted is left where its communicator is discarded; otherwise it is done."""
        self._work.put(None)
        atexit.unregister(self._check_idle)

    def is_current(self) -> bool:
        """Whether it runs the caller."""
        return threading.current_thread() is self._thread

    def wait_until_idle(self) -> None:
        """Return when all that was submitted is done, whether or not it failed; on the thread itself, at once."""
        last = self._unfinished
        if last is not None and not last.done() and not self.is_current():
            concurrent.futures.wait([last])

    def submit(self, work: Callable[[], None], frame: FrameType | SourceLine) -> Future[None]:
        """Have `work` done after what was submitted before. `frame`: where the program did so, for reports.

        What it raises is in the result; a rank that got an error must not submit anything further.
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
            del work, place, done  # which may hold the memory of gradients

    def _check_idle(self) -> None:
        """At exit, before MPI_Finalize, which a thread inside MPI may keep from returning."""
        last = self._unfinished
        if os.getpid() != self._pid or last is None:
            return
        if not concurrent.futures.wait([last], self._patience).done:
            end = rank_end()
            end.end_job(
                f"ending the job: {end.who} came to its end while a reduction of gradients, or another collective that "
                "it had not waited for, was under way, and other ranks did not take part in it",
                1,
            )
