"""A library's group of all ranks (NCCL's communicator, torch's process group), which starts and fails on all alike.

Its kernels wait for those of the other ranks, and for ever if a rank fails. So it is aborted on all ranks, and before
anybody hears of the failure: the program could not even free its memory while a kernel spins.

mpi4py is imported below this file, and this file on first use: `import mpistrat` starts no MPI.
"""

from __future__ import annotations

import contextlib
import functools
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
    """How a rank's start went.

    Attributes:
        error: of the library; "" if there was none.
        is_late: the rank waited as long as a start may last.
        has_ended: the library's calls have returned.
    """

    error: str
    is_late: bool
    has_ended: bool

    @property
    def tells_others(self) -> bool:
        """Whether the rank sends word, for the others may wait for it."""
        return bool(self.error) or self.is_late


# Of the time that all of a start may take: ranks that a library leaves waiting take another way then.
SHARE_OF_THE_START = 0.5


class CollectiveGroup(contextlib.AbstractContextManager[T], Generic[T]):
    """Surrounds each use of a group, and hands it out: what fails inside, on this rank or another, fails on all ranks.

    Raises: in place of what the body raises, RuntimeError. On entering: if the group was aborted, RuntimeError, or
        StallError where the ranks are to raise one.
    Args:
        name: "NCCL".
        host: the communicator of the same ranks, for objects.
        channel: between them. Several groups may share it: they fail together.
        watch: where ranks that wait are watched.
        abort: ends what the group's kernels do, and the group. Called once, by any thread.

    Attributes:
        group: the library's; None before it has started, and once it is aborted.
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
        self.name, self.group = name, None
        self._host, self._channel, self._watch = host, channel, watch
        self._abort_group = abort
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        if watch.revocable_group is not None:
            watch.revocable_group.before_telling(
                lambda: self.abort(RankLostError("a rank of this communicator has failed"))
            )

    def start(self, make: Callable[[], T], sum_of_ones: Callable[[T], float]) -> str:
        """Make the group and try it out. Collective.

        A library waits for the other ranks in calls that nothing interrupts; so this rank leaves them to a thread, and
        listens to the others meanwhile.

        Args:
            make: returns the group; it waits for the other ranks.
            sum_of_ones: uses it, to add up a 1 of each rank.
        Returns: why the group cannot be used, with the number of a rank; "" if it can. The same on all ranks.
        """
        outcome: list[str] = []  # of the thread: empty until it ends

        def run() -> None:
            make_own_current()
            try:
                self._adopt(make())
                group, size = self.group, self._host.size
                if group is None:
                    outcome.append("it was aborted")
                    return
                total = sum_of_ones(group)
                outcome.append("" if total == size else f"its sum of {size} ones is {total}")
            except BaseException as error:
                outcome.append(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=run, name=f"mpistrat start of {self.name}", daemon=True)
        thread.start()
        job_end().call_last(
            functools.partial(thread.join, deadlines.RANK_WAITS_FOR_THREAD_IN_LIBRARY)
        )
        limit = start_seconds() * SHARE_OF_THE_START  # 0: none
        is_late = not self._is_settled_within(limit or math.inf, outcome)
        start = _RankStart("".join(outcome), is_late, bool(outcome))
        if start.tells_others:
            self._channel.send(start.error)
        starts: list[_RankStart] = self._host.all_gather_object(start)
        self._channel.settle(rank for rank, start in enumerate(starts) if start.tells_others)
        reason = _why_not_started(self.name, starts, limit)
        if reason:
            self.abort(reason)
        return reason

    def _is_settled_within(self, seconds: float, outcome: Sequence[str]) -> bool:
        """Wait for the outcome of this rank's start, or another rank's failure. Returns: whether one came in time."""
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
        """The group cannot be used any more: end what it does. Not collective; any thread, any number of times."""
        with self._lock:
            if self._failure is None:
                self._failure = why if isinstance(why, Exception) else RuntimeError(why)
            group, self.group = self.group, None
        if group is not None:
            make_own_current()
            self._abort_group(group)

    def _adopt(self, made: T) -> None:
        with self._lock:
            if self._failure is None:
                self.group = made
                return
        self._abort_group(made)  # it came too late
        raise self._failure

    def hear(self) -> str | None:
        """Abort the group if another rank has failed. Returns: that rank's words; None if none has."""
        text = self._channel.received()
        if text is not None and self.group is not None:
            self._channel.tell(text)  # so that all ranks abort at the same time
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
            self._raise_failure()  # by another thread, which had this error follow
        if isinstance(error, (StallError, RankLostError)):  # on all ranks that wait here
            self.abort(error)
            return
        text = f"rank {self._host.rank}: {type(error).__name__}: {error}"
        # The others are told before the abort: their groups would see that this one has gone, and torch print traces.
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
        """Wait, inside, for what this rank's device does; or for another rank's failure, after which it never ends."""

        def done_or_failed() -> bool:
            failure = self.hear()
            if failure is not None:
                raise FailedElsewhereError(failure)
            return done()

        wait_until(done_or_failed, self._watch)


def _why_not_started(name: str, starts: Sequence[_RankStart], limit: float) -> str:
    """Why the group `name` cannot be used; "" if it has started on all ranks. Args: limit: of a start, in seconds."""
    failed = [f"on rank {rank}: {start.error}" for rank, start in enumerate(starts) if start.error]
    late = [str(rank) for rank, start in enumerate(starts) if start.is_late or not start.has_ended]
    if late and not failed:
        failed = [f"in {limit:g} s on ranks {', '.join(late)}"]
    more = "; …" * (len(failed) > 4)
    return f"{name} does not start {'; '.join(failed[:4])}{more}" if failed else ""


class FailedElsewhereError(Exception):
    """Another rank has failed, and the group is aborted here."""
