"""The calls of a process group, and the works (`torch.distributed.Work`) that calls return."""

from __future__ import annotations

import atexit
import concurrent.futures
import datetime
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpistrat.communicators.communication_thread import CommunicationThread, takes_a_core
from mpistrat.communicators.communicator import Communicator
from mpistrat.communicators.contract.joint_errors import is_raised_by_all
from mpistrat.errors import StallError
from mpistrat.liveness import deadlines
from mpistrat.liveness.call_site import call_site, outside
from mpistrat.liveness.ending.rank_end import rank_end
from mpistrat.torch_distributed.after_backward import CallsAfterBackward, inside_backward


class DoneWork(dist.Work):
    """The `torch.distributed.Work` of a call that has ended without an error.

    Args: result: the output tensors of the call.
    """

    def __init__(self, result: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._result = list(result)

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        return True

    def synchronize(self) -> None:
        self.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        return None

    def result(self) -> list[Tensor]:
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._result)
        return future


def seconds_of(timeout: datetime.timedelta | None) -> float:
    """Return `timeout` in seconds; 0 (no limit) for None or a negative timeout."""
    return max(0.0, timeout.total_seconds()) if timeout else 0.0


def _nothing() -> None:
    pass


# Called with the work of a failed call.
OnFailure = Callable[["UnfinishedWork"], None]


class UnfinishedWork(DoneWork):
    """The `torch.distributed.Work` of a call that goes on while the program does other things.

    `wait` raises the error of the call, if there is one. If the program has asked for a future, as DDP does for its
    buckets, an error ends the job, because torch does not raise errors of such futures.
    Args:
        result: the output tensors of the call.
        failed: called with this work if its call has failed, on any thread.

    Attributes:
        observed: whether the program has asked for the error: by `wait`, `get_future`, or `exception` after the end.
        make: called at the start of `wait`. It makes the call now if the call was put off until the end of backward().
    """

    def __init__(self, result: Sequence[Tensor], failed: OnFailure) -> None:
        super().__init__(result)
        self.observed = False
        self.make: Callable[[], None] = _nothing
        self._failed = failed
        self._done: concurrent.futures.Future[None] = concurrent.futures.Future()

    def end(self, error: BaseException | None) -> None:
        """Mark the call as ended. Args: error: the call's error; None if it has succeeded."""
        if error is None:
            self._done.set_result(None)
        else:
            self._failed(self)
            self._done.set_exception(error)

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        self.make()
        self.observed = True
        self._wait_until_done(seconds_of(timeout))
        self._done.result()
        return True

    def is_completed(self) -> bool:
        return self._done.done()

    def exception(self) -> BaseException | None:
        if not self.is_completed():
            return None
        self.observed = True
        return self._done.exception()

    def get_future(self) -> torch.futures.Future[Any]:
        self.observed = True
        future: torch.futures.Future[Any] = torch.futures.Future()

        def complete(done: concurrent.futures.Future[None]) -> None:
            error = done.exception()
            if error is not None:
                end_job_for(error)
            future.set_result(self._result)

        self._done.add_done_callback(complete)
        return future

    def _wait_until_done(self, seconds: float) -> None:
        """Wait until the call has ended. Does not raise the call's own error.

        Raises: StallError if the call has not ended after `seconds`; 0 for no limit.
        """
        if not concurrent.futures.wait([self._done], seconds or None).done:
            raise StallError(
                f"the call had not ended when Work.wait(timeout={seconds:g} s) gave up. Let all ranks make the call"
            )


class CoalescedWork(DoneWork):
    """Several works as one `torch.distributed.Work`, for coalesced calls. It has ended when all of them have."""

    def __init__(self, works: Sequence[DoneWork]) -> None:
        super().__init__([tensor for work in works for tensor in work.result()])
        self._works = works

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def exception(self) -> BaseException | None:
        for work in self._works:
            error = work.exception()
            if error is not None:
                return error
        return None

    def get_future(self) -> torch.futures.Future[Any]:
        futures = [work.get_future() for work in self._works]
        return torch.futures.collect_all(futures).then(lambda _: self._result)


class GroupCalls:
    """Makes the calls of a process group, one after another, in the program's order: the same order on all ranks.

    A synchronous call runs on the program's thread, after all earlier asynchronous calls have ended. An asynchronous
    call (`async_op=True`, DDP's buckets) runs on a communication thread. If the node has no core to spare for such a
    thread, asynchronous calls inside a backward() are put off until its end. Without MPI_THREAD_MULTIPLE all calls are
    synchronous.
    Args:
        communicator: the group's communicator.
        name: torch's name of the group.
        cpu_share: number of CPUs of this rank. A CPU that ranks share counts in part.

    Attributes:
        coalesced: works of the calls since torch's `_start_coalescing`; None outside of coalesced calls.
        failed: works of failed calls. The next call, or the end, raises errors that the program has not asked for.
    """

    def __init__(self, communicator: Communicator, name: str, cpu_share: float) -> None:
        self._communicator = communicator
        self._name = name
        self._cpu_share = cpu_share
        self.coalesced: list[DoneWork] | None = None
        self.failed: list[UnfinishedWork] = []
        self._order = threading.RLock()  # orders the calls of several threads of the program
        self._thread: CommunicationThread | None = None
        self._after_backward = CallsAfterBackward()
        self._is_shut_down = False
        self._pid = os.getpid()
        # Registered before the communication thread's handler, so it runs after it: all calls have ended then.
        atexit.register(self._end_job_if_unobserved)

    def run(
        self, is_async: bool, result: Sequence[Tensor], call: Callable[..., None], *operands: Any
    ) -> DoneWork:
        """Make a call on this thread if it is synchronous, else have the communication thread make it.

        Called by: each collective of the process group.
        Args:
            is_async: whether the program goes on before the call has ended.
            result: the output tensors of the call.
            call, operands: the call to make is `call(*operands)`.
        Returns: the work of the call; a `DoneWork` if this thread has made it.
        Raises: RuntimeError if the group is destroyed, or in a forked child; the error of a synchronous call; the error
            of an earlier call that nobody has waited for.
        """
        self.check_usable()
        thread = self._thread
        # This thread may be in a callback of the future of a call that it has just made. The callback's calls come next
        # on all ranks, whether a rank's communication thread or its thread of backward() makes them. So they are made
        # now: a wait for calls that this thread still has to make would never end.
        if thread is not None and (self._after_backward.is_making() or thread.is_current()):
            self._make(call, operands)
            self._stay_inside(True)
        elif is_async and self._communicator.thread_multiple:
            return self.collect(self._begin(result, call, operands))
        else:
            if thread is not None:
                self._after_backward.make()
                thread.wait_until_idle()
            self._make(call, operands)
        return self.collect(DoneWork(result))

    def _begin(
        self, result: Sequence[Tensor], call: Callable[..., None], operands: Sequence[Any]
    ) -> UnfinishedWork:
        """Submit a call to the communication thread, or put it off until the end of the running backward().

        It is put off if this thread is inside backward() and the node has no core for the communication thread.
        Returns: the work of the call.
        """
        with self._order:
            if self._thread is None:
                self._thread = CommunicationThread(
                    self._communicator, deadlines.PROGRAM_END_WAITS_FOR_CALLS
                )
        after = self._after_backward
        cpus = self._cpu_share
        threads = torch.get_num_threads()
        is_busy = takes_a_core(self._communicator.on_one_node, cpus, threads)
        holds = after.is_worth_it and is_busy and inside_backward()
        work = UnfinishedWork(result, self.failed.append)

        def make() -> None:
            try:
                self._make(call, operands)
            except BaseException as error:
                error.called_at = call_site(sys._getframe())  # type: ignore[attr-defined]
                work.end(error)
                return
            # Callbacks of the work's future run inside `work.end`.
            self._stay_inside(True)
            try:
                work.end(None)
            finally:
                self._stay_inside(False)

        frame = outside(sys._getframe(2))
        if holds:
            work.make = after.make
            after.add(make, self._thread, frame)
        else:
            self._thread.submit(make, frame)
        return work

    def collect(self, work: DoneWork) -> DoneWork:
        if self.coalesced is not None:
            self.coalesced.append(work)
        return work

    def check_usable(self) -> None:
        """Check that the group can make a call, and raise errors that the program has not asked for.

        Raises: RuntimeError if the group was destroyed, or in a forked child; else the error of an earlier call that
            nobody has waited for.
        """
        rank = self._communicator.rank
        if self._is_shut_down:
            raise RuntimeError(f"rank {rank}: the process group {self._name!r} was destroyed")
        if self._pid != os.getpid():
            raise RuntimeError(
                f"the process group {self._name!r} was used in a forked child of rank {rank}; MPI belongs to the "
                "parent: return the child's results, and communicate there"
            )
        if self.failed:
            self._raise_unobserved()

    def shut_down(self, native: Callable[[], None], give_back: Callable[[], None]) -> None:
        """Wait until this rank's calls have ended, and let no further call begin. Not collective.

        A second call does nothing.
        Args:
            native: shuts down torch's own groups. It is called first, when no call can begin any more.
            give_back: gives the communicators back. It is called when all calls have ended.
        Raises: the error of a call that nobody has waited for, at the end.
        """
        if self._is_shut_down:
            return
        self._is_shut_down = True
        native()
        if self._thread is not None:
            self._after_backward.make()
            self._thread.wait_until_idle()
            self._thread.end()
        give_back()
        self._raise_unobserved()
        atexit.unregister(self._end_job_if_unobserved)

    def abort(self, native: Callable[[], None]) -> None:
        """End the group at once: give up its calls, and drop errors that nobody has asked for. Not collective.

        Args: native: aborts torch's own groups. It is called when no call can begin any more.
        """
        self._is_shut_down = True
        atexit.unregister(self._end_job_if_unobserved)
        native()
        self._after_backward.leave()
        if self._thread is not None:
            self._thread.end()

    def _make(self, call: Callable[..., None], operands: Sequence[Any]) -> None:
        """Make `call(*operands)` on this thread.

        Raises: the call's error. If only this rank has the error, the other ranks raise CollectiveMismatchError in the
            call.
        """
        with self._order:
            try:
                call(*operands)
            except Exception as error:
                if is_raised_by_all(error) or self._communicator.contract.is_abandoned:
                    raise
                self._communicator.raise_together(error)

    def _stay_inside(self, stays: bool) -> None:
        watch = self._communicator.contract.watch
        if watch is not None:
            watch.stay_inside(stays)

    def _raise_unobserved(self) -> None:
        """Raise the first error of an earlier call that the program has not asked for; return if there is none."""
        while self.failed:
            work = self.failed.pop(0)
            if not work.observed:
                work.wait()

    def _end_job_if_unobserved(self) -> None:
        """At exit, end the job if a call has failed and the program has not asked for the error."""
        try:
            self._raise_unobserved()
        except Exception as error:
            end_job_for(error)


def end_job_for(error: BaseException) -> None:
    """Print `error` with its traceback, and end the job with exit code 1, because nobody would see the error."""
    rank_end().end_job_for(error, "".join(traceback.format_exception(error)), 1)
