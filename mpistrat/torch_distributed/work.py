"""What a call returns before, or after, its tensors have moved."""

from __future__ import annotations

import concurrent.futures
import datetime
import io
import traceback
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from mpistrat.errors import StallError
from mpistrat.liveness.rank_end import rank_end


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


class PendingWork(DoneWork):
    """Of a call that a communication thread makes.

    Args:
        done: completed by the thread, with the error of the call, if any. The error is raised by `wait`; where only a
            future was asked for, as by DDP's buckets, it ends the job: torch does not raise errors of such futures.
    """

    def __init__(
        self, done: concurrent.futures.Future[None], result: Sequence[torch.Tensor] = ()
    ) -> None:
        super().__init__(result)
        self._done = done
        self.observed = False  # whether somebody has got the error, or will

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        self.observed = True
        seconds = timeout.total_seconds() if timeout else 0
        try:
            self._done.result(seconds if seconds > 0 else None)
        except concurrent.futures.TimeoutError:
            if self._done.done():
                raise
            raise StallError(
                f"the call had not ended when Work.wait(timeout={seconds:g} s) gave up"
            ) from None
        return True

    def is_completed(self) -> bool:
        return self._done.done()

    def exception(self) -> BaseException | None:
        if not self._done.done():
            return None
        self.observed = True
        return self._done.exception()

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        self.observed = True

        def complete(done: concurrent.futures.Future[None]) -> None:
            error = done.exception()
            if error is not None:
                end_job_for(error)
            future.set_result(self._result)

        self._done.add_done_callback(complete)
        return future


class Steps(DoneWork):
    """Several works as one, which has ended when all have."""

    def __init__(self, works: Sequence[dist.Work], result: Sequence[torch.Tensor]) -> None:
        super().__init__(result)
        self._works = works

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def end_job_for(error: BaseException) -> None:
    """End the job for an error that nobody would see, with its traceback."""
    text = io.StringIO()
    traceback.print_exception(error, file=text)
    end = rank_end()
    end.end_job(f"{end.who} failed; ending the job\n{text.getvalue()}", 1)
