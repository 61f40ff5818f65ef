"""Several replicas in one rank. They take turns, one at a time, in replica order.

Replica 0 runs on the calling thread, and every other replica on a thread of its own, so that each replica has its own
thread-local state. A turn is a replica's work up to the point where the replicas meet (a `merge_call`), or up to the
end of the run. The order is fixed: first every replica works up to the meeting, then the merge function runs, then
every replica works on from the meeting.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mpistrat.machine.devices import make_own_current

MergeFunction = Callable[[list[Any]], Any]


class ReplicaState(Protocol):
    """State that each replica has for itself, although torch keeps only one per rank: gradients, buffers, generators.

    During a replica's turn, its state is in torch's modules and generators. The states of the other replicas are put
    away. `pytorch.virtual_replicas.TorchState` implements this protocol.
    """

    def inherit(self) -> Callable[[], contextlib.AbstractContextManager[object]]:
        """Return a function that makes a context with the modes of the thread that calls `inherit`.

        Torch keeps these modes per thread: autocast, for example, and whether gradients are on.

        Called by: a run, on the program's thread. The thread of each other replica enters the context around its work.
        """
        ...

    def begin(self) -> None:
        """Prepare for a run, while replica 0's state is in place."""
        ...

    def end(self) -> None:
        """Finish a run, also after an error. Replica 0's state is in place again."""
        ...

    def switch(self, leaving: int, entering: int) -> None:
        """Put away the state of local replica `leaving`, and put the state of replica `entering` in place."""
        ...


class _Stopped(BaseException):
    """Unwinds a replica's stack after another replica, or the merge function, has failed."""


class _Replica(threading.Thread):
    """The thread of a replica other than the first. It waits for a turn, does its work, and waits again.

    Attributes:
        turn: a lock; to release it gives the thread a turn.
        back: a lock that the thread releases at the end of its turn: when its replica meets the others, or has ended.
        work: calls the replica's function in the current run; None between runs. A turn without work ends the thread.
    """

    def __init__(self, index: int) -> None:
        super().__init__(name=f"mpistrat-replica-{index}", daemon=True)
        self.turn = threading.Lock()
        self.back = threading.Lock()
        self.turn.acquire()
        self.back.acquire()
        self.work: Callable[[], None] | None = None
        self.start()

    def run(self) -> None:
        make_own_current()
        while True:
            self.turn.acquire()
            if self.work is None:
                return
            self.work()
            self.work = None
            self.back.release()


class LocalReplicas:
    """Runs a function on each of `count` replicas of this rank. A run is one call of the method `run`.

    Attributes:
        states: the states that are swapped when one replica's turn ends and another's begins.
        current: thread-local; its attribute `run` is the run that the thread works for.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.states: list[ReplicaState] = []
        self._idle: list[list[_Replica]] = []  # threads of finished runs, for the next run
        self.current = threading.local()
        weakref.finalize(self, _end, self._idle)

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """Call `body(i)` for each local replica i, and return the results in replica order.

        Replica 0's call runs on the calling thread.

        Raises:
            RuntimeError: the replicas called `meet` a different number of times.
            Exception: the first exception of a `body` or of a merge function, unchanged. The other replicas stop where
                they are.
        """
        threads = self._idle.pop() if self._idle else [_Replica(i) for i in range(1, self.count)]
        run = _Run(self, threads, body)
        outer = getattr(self.current, "run", None)
        self.current.run = run
        try:
            return run.run()
        finally:
            self.current.run = outer
            self._idle.append(threads)

    def meet(self, index: int, merge: MergeFunction, operands: Any) -> Any:
        """Wait until every replica of this rank has called this. Returns: the result of `merge`, to every replica.

        Only replica 0's `merge` is called, once, on its thread. It gets a list of all `operands`, in replica order.

        Called by: replica `index`, inside `run`.
        """
        return self.current.run.meet(index, merge, operands)


def _end(idle: list[list[_Replica]]) -> None:
    """End the threads of finished runs. Called by: the garbage collector, when their `LocalReplicas` is gone."""
    for threads in idle:
        for thread in threads:
            thread.turn.release()


class _Run:
    def __init__(
        self, replicas: LocalReplicas, threads: Sequence[_Replica], body: Callable[[int], Any]
    ) -> None:
        self._replicas = replicas
        self._threads = threads
        self._body = body
        self._results: list[Any] = [None] * replicas.count
        self._operands: list[Any] = [None] * replicas.count
        self._merged: Any = None
        self._error: BaseException | None = None
        self._active = 0  # the replica with its state in place
        self._started = [False] * replicas.count
        self._stopping = False

    def run(self) -> list[Any]:
        for state in self._replicas.states:
            state.begin()
        for index, thread in enumerate(self._threads, start=1):
            thread.work = self._prepare(index)
        try:
            self._results[0] = self._body(0)
            if self._error is None:
                self._let_others_run(to_meeting=False)
        except BaseException as error:
            self._error = self._error or error
        self._stop()
        self._switch_to(0)
        for state in self._replicas.states:
            state.end()
        if self._error is not None:
            raise self._error
        return self._results

    def meet(self, index: int, merge: MergeFunction, operands: Any) -> Any:
        if self._stopping:
            raise _Stopped
        self._operands[index] = operands
        if index > 0:
            thread = self._threads[index - 1]
            thread.back.release()
            thread.turn.acquire()
            if self._stopping:
                raise _Stopped
            return self._merged
        self._let_others_run(to_meeting=True)
        self._switch_to(0)
        operands_of_all = self._operands
        self._operands = [None] * self._replicas.count
        self._merged = merge(operands_of_all)
        return self._merged

    def _let_others_run(self, to_meeting: bool) -> None:
        """Give each replica but replica 0 a turn, up to its next meeting or to its end. Called by: replica 0's thread.

        Args: to_meeting: whether replica 0 is in a meeting; the other replicas must then come to a meeting, too. If
            False, replica 0 has ended, and the other replicas must end.
        Raises: RuntimeError if a replica ends instead of meeting, or meets instead of ending; else a replica's error.
        """
        for index, thread in enumerate(self._threads, start=1):
            if thread.work is not None:
                self._give_turn(index)
                if self._error is not None:
                    raise self._error
            if (thread.work is not None) != to_meeting:
                raise RuntimeError(
                    "all replicas must call merge_call (or a collective, a variable's update or "
                    f"backward(), which need it) equally often; replicas 0 and {index} of this rank "
                    "did not"
                )

    def _give_turn(self, index: int) -> None:
        self._switch_to(index)
        self._started[index] = True
        thread = self._threads[index - 1]
        thread.turn.release()
        thread.back.acquire()

    def _switch_to(self, index: int) -> None:
        if index != self._active:
            for state in self._replicas.states:
                state.switch(self._active, index)
            self._active = index

    def _prepare(self, index: int) -> Callable[[], None]:
        entered = [state.inherit() for state in self._replicas.states]
        context = contextvars.copy_context()

        def work() -> None:
            self._replicas.current.run = self
            try:
                with contextlib.suppress(_Stopped), contextlib.ExitStack() as stack:
                    for enter in entered:
                        stack.enter_context(enter())
                    self._results[index] = context.run(self._body, index)
            except BaseException as error:
                self._error = self._error or error
            finally:
                self._replicas.current.run = None

        return work

    def _stop(self) -> None:
        """Unwind the replicas that wait in a meeting. The other replicas have ended or never started."""
        self._stopping = True
        for index, thread in enumerate(self._threads, start=1):
            if thread.work is not None and self._started[index]:
                self._give_turn(index)
            thread.work = None
