"""A library's group of all ranks (NCCL's communicator, torch's process group) that starts on all ranks or on none.

The group's kernels wait for the kernels of the other ranks, for ever if a rank fails. So an error on one rank aborts
the group on all ranks. The group is aborted before the program gets the error, because a program could not even free
GPU memory while a kernel spins.

This file's imports load mpi4py. So it is imported on first use only: `import mpistrat` starts no MPI.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

from mpistrat.communicators.communicator import Communicator
from mpistrat.errors import RankLostError, StallError
from mpistrat.liveness import deadlines
from mpistrat.liveness.ending.abort_channel import AbortChannel
from mpistrat.liveness.ending.job_end import job_end
from mpistrat.liveness.records.watch import CommunicatorWatch
from mpistrat.liveness.waiting import wait_until
from mpistrat.machine.devices import make_own_current
from mpistrat.settings import start_seconds

T = TypeVar("T")


class _RankStart(NamedTuple):
    """How the start of a group went on one rank.

    Attributes:
        error: the library's error; "" if there was none, or the library's calls have not returned.
        is_late: whether the rank waited for half of MPISTRAT_START_SECONDS, and neither did the calls return nor did
            another rank fail.
        has_ended: whether the library's calls have returned.
    """

    error: str
    is_late: bool
    has_ended: bool

    @property
    def tells_others(self) -> bool:
        """Whether the rank sends its failure to the other ranks, which may be waiting for it."""
        return bool(self.error) or self.is_late


# The part of MPISTRAT_START_SECONDS that a group's start may take. The rest is for making another transport.
SHARE_OF_THE_START = 0.5


class CollectiveGroup(contextlib.AbstractContextManager[T], Generic[T]):
    """Hands out a library's group for each use, and aborts the group on all ranks if one rank fails in a use.

    A use is `with collective_group as group:`. The group is aborted if the `with` block raises an error, or if another
    rank fails while `wait_until` waits.

    Args:
        name: the group's name in messages: "NCCL".
        host: the communicator of the ranks of the group, for objects.
        channel: the abort channel: it carries a rank's error to the other ranks. Groups that share it fail together.
        watch: this rank's record of the calls that it waits in; the node's observer reads it.
        abort: takes the group, and ends it and its kernels. Called once, by any thread.

    Attributes:
        group: the library's group; None before the start and after an abort.

    Raises: on entering an aborted group, a RuntimeError, or the StallError or RankLostError that aborted it. On leaving
        after an error in the body: a RuntimeError that names the rank; StallError and RankLostError stay as they are.
    """

    group: T | None

    def __init__(
        self,
        name: str,
        host: Communicator,
        channel: AbortChannel,
        watch: CommunicatorWatch,
        abort: Callable[[T], None],
    ) -> None:
        self.name = name
        self.group = None
        self._host = host
        self._channel = channel
        self._watch = watch
        self._abort_group = abort
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        if watch.revocable_group is not None:
            watch.revocable_group.before_telling(
                lambda: self.abort(RankLostError("a rank of this communicator has failed"))
            )

    def start(self, make: Callable[[], T], sum_of_ones: Callable[[T], float]) -> str:
        """Make the group on all ranks and try it out. Collective. A group that cannot be used is aborted.

        The library's calls wait for the other ranks, and nothing interrupts them. So a thread makes these calls, while
        this rank listens for failures of the other ranks.

        Args:
            make: makes and returns the group. It waits for the other ranks.
            sum_of_ones: adds up a 1 from each rank with the group, and returns the sum.
        Returns: why the group cannot be used, with the errors of at most four ranks; "" if it can. The text is the same
            on all ranks. Errors of `make` and `sum_of_ones` are not raised.
        """
        outcome: list[str] = []  # empty until the thread ends; then its error, or ""

        def run() -> None:
            make_own_current()
            try:
                self._adopt(make())
                group = self.group
                size = self._host.size
                if group is None:
                    outcome.append("it was aborted")
                    return
                total = sum_of_ones(group)
                outcome.append("" if total == size else f"its sum of {size} ones is {total}")
            except BaseException as error:
                outcome.append(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=run, name=f"mpistrat start of {self.name}", daemon=True)
        thread.start()
        job_end().call_last(lambda: thread.join(deadlines.RANK_WAITS_FOR_THREAD_IN_LIBRARY))
        limit = start_seconds() * SHARE_OF_THE_START  # 0: no limit
        is_late = not self._is_settled_within(limit or math.inf, outcome)
        start = _RankStart("".join(outcome), is_late, bool(outcome))
        if start.tells_others:
            self._channel.send(start.error)
        starts: list[_RankStart] = self._host.all_gather_object(start)
        senders = [rank for rank, start in enumerate(starts) if start.tells_others]
        self._channel.settle(senders)
        reason = _why_not_started(self.name, starts, limit)
        if reason:
            self.abort(reason)
        return reason

    def _is_settled_within(self, seconds: float, outcome: Sequence[str]) -> bool:
        """Wait until this rank's start has ended or another rank has failed.

        An error in the wait, such as KeyboardInterrupt, aborts the group on all ranks and is raised.
        Args: outcome: filled by the thread when the start has ended.
        Returns: False if neither came within `seconds`.
        """
        until = time.monotonic() + seconds

        def is_settled() -> bool:
            return bool(outcome) or self._channel.received() is not None

        try:
            wait_until(lambda: is_settled() or time.monotonic() > until, self._watch)
            return is_settled()
        except BaseException as error:
            self.__exit__(None, error, None)
            raise

    def abort(self, why: str | Exception) -> None:
        """Abort the group on this rank, because of `why`. Not collective; any thread may call it, any number of times.

        After that, entering the group raises an error: `why` if it is a StallError or RankLostError, else a
        RuntimeError with its text. Only the first `why` counts.
        """
        with self._lock:
            if self._failure is None:
                self._failure = why if isinstance(why, Exception) else RuntimeError(why)
            group = self.group
            self.group = None
        if group is not None:
            make_own_current()
            self._abort_group(group)

    def _adopt(self, made: T) -> None:
        with self._lock:
            if self._failure is None:
                self.group = made
                return
        self._abort_group(made)  # the group was aborted before the library had made it
        raise self._failure

    def hear(self) -> str | None:
        """Abort the group if another rank has failed. Raises nothing.

        Called by: `wait_until`, and the thread of `EventWatcher`.
        Returns: the failed rank's message; None if no rank has failed.
        """
        text = self._channel.received()
        if text is not None and self.group is not None:
            self._channel.tell(text)  # waits until all ranks know: they abort at the same time
            self.abort(text)
        return text

    def __enter__(self) -> T:
        group = self.group
        if group is None:
            self._raise_failure()
        return group

    def __exit__(self, kind: object, error: BaseException | None, trace: Any) -> None:
        if error is None:
            return
        if isinstance(error, FailedElsewhereError):
            raise RuntimeError(f"{self.name} was aborted on all ranks: {error}") from None
        if self._failure is not None and isinstance(error, Exception):
            self._raise_failure()  # another thread has aborted the group, and the abort caused this error
        if isinstance(error, (StallError, RankLostError)):  # all waiting ranks get this error
            self.abort(error)
            return
        text = f"rank {self._host.rank}: {type(error).__name__}: {error}"
        # Tell the other ranks before the abort. Else their groups would notice it first, and torch would print traces.
        self._channel.tell(text)
        self.abort(text)
        if isinstance(error, Exception):
            raise RuntimeError(f"{self.name} was aborted on all ranks: {text}") from error

    def _raise_failure(self) -> NoReturn:
        if isinstance(self._failure, (StallError, RankLostError)):
            raise type(self._failure)(str(self._failure))
        raise RuntimeError(
            f"rank {self._host.rank}: {self.name} cannot be used any more: {self._failure}. Save what you need and end "
            "the program"
        )

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Wait until `done` returns True. Called inside `with collective_group:`, for the work of this rank's device.

        Raises: FailedElsewhereError if another rank fails, because the device then never ends its work; leaving the
            `with` block makes a RuntimeError of it. StallError or RankLostError as `liveness.waiting.wait_until`.
        """

        def done_or_failed() -> bool:
            failure = self.hear()
            if failure is not None:
                raise FailedElsewhereError(failure)
            return done()

        wait_until(done_or_failed, self._watch)


def _why_not_started(name: str, starts: Sequence[_RankStart], limit: float) -> str:
    """Return why the group `name` cannot be used; "" if it has started on all ranks.

    The errors of the first four ranks that have one; without errors, the ranks that did not end in time.
    Args: starts: how the start went on each rank.   limit: the time limit in seconds, for the text.
    """
    failed = []
    late = []
    for rank, start in enumerate(starts):
        if start.error:
            failed.append(f"on rank {rank}: {start.error}")
        if start.is_late or not start.has_ended:
            late.append(str(rank))
    if late and not failed:
        failed = [f"in {limit:g} s on ranks {', '.join(late)}"]
    if not failed:
        return ""
    shown = failed[:4]
    if len(failed) > 4:
        shown.append("…")
    return f"{name} does not start {'; '.join(shown)}"


class FailedElsewhereError(Exception):
    """Another rank has failed, so this rank has aborted the group. The message is the other rank's."""
