"""What a call returns before, or after, its tensors have moved."""

from __future__ import annotations

import concurrent.futures
import datetime
import io
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mpistrat.errors import StallError
from mpistrat.liveness.ending.rank_end import rank_end


class DoneWork(dist.Work):
    """Of a call that has ended.

    Args: result: its tensors.
    """

    def __init__(self, result: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self._result = list(result)

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._result)
        return future


class UnfinishedWork(DoneWork):
    """Of a call that goes on while the program does.

    The error of the call, if any, is raised by `wait`. Where only a future was asked for, as by DDP's buckets, it ends
    the job: torch does not raise errors of such futures. An error that nobody has asked for goes to `failed`.

    Args:
        failed: called with this work if its call has failed, on any thread.
        make: makes the call, which waits for that; None: it goes on by itself.

    Attributes:
        observed: whether somebody has got the error, or will.
    """

    def __init__(
        self,
        result: Sequence[torch.Tensor],
        failed: Callable[[UnfinishedWork], None],
        make: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(result)
        self.observed = False
        self._failed, self._make = failed, make
        self._done: concurrent.futures.Future[None] = concurrent.futures.Future()

    def end(self, error: BaseException | None) -> None:
        """The call has ended, with `error` if it failed."""
        if error is None:
            self._done.set_result(None)
        else:
            self._failed(self)
            self._done.set_exception(error)

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        if self._make is not None:
            self._make()
        self.observed = True
        seconds = timeout.total_seconds() if timeout else 0.0
        self._wait_until_done(max(0.0, seconds))
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
        """Raises: StallError if the call has not ended after `seconds`; 0: no limit."""
        if not concurrent.futures.wait([self._done], seconds or None).done:
            raise StallError(
                f"the call had not ended when Work.wait(timeout={seconds:g} s) gave up"
            )


class Steps(DoneWork):
    """Several works as one, which has ended when all have."""

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
        return next((e for work in self._works if (e := work.exception()) is not None), None)

    def get_future(self) -> torch.futures.Future[Any]:
        futures = [work.get_future() for work in self._works]
        return torch.futures.collect_all(futures).then(lambda _: self._result)


def end_job_for(error: BaseException) -> None:
    """End the job for an error that nobody would see, with its traceback."""
    text = io.StringIO()
    traceback.print_exception(error, file=text)
    rank_end().end_job_for(error, text.getvalue(), 1)
