"""How far each worker is, and how far one may be ahead of the slowest.

Stale synchronous parallel, as in Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
Server", NIPS 2013. A worker may begin step c when all others have ended step c - k - 1: with k = 0 nobody begins a step
before all have ended the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpistrat.errors import StallError
from mpistrat.parameter_server.post import Asked, Post

# A notice: so many steps are ended. Requests: whether the next may begin; how many steps each has ended.
ENDED, MAY_BEGIN, STEPS = "steps ended", "may begin", "steps"


class Clock:
    """On one server: the steps of all workers.

    Args: workers: ranks; those that are done, or lost, hold nobody back.
    """

    def __init__(self, post: Post, workers: Sequence[int]) -> None:
        self._post = post
        self._steps = dict.fromkeys(workers, 0)
        self._working = set(workers)
        self._waiting: list[tuple[int, Asked]] = []
        post.handle(ENDED, self._ended)
        post.handle(MAY_BEGIN, self._may_begin)
        post.handle(STEPS, lambda source, asked: post.answer(source, asked.ticket, self._steps))

    @property
    def slowest(self) -> int:
        """The steps of the worker that has ended fewest."""
        return min((self._steps[rank] for rank in self._working), default=1 << 62)

    def leave(self, rank: int) -> None:
        self._working.discard(rank)
        self._look()

    def _ended(self, rank: int, steps: int) -> None:
        self._steps[rank] = steps
        self._look()

    def _may_begin(self, source: int, asked: Asked) -> None:
        """Answered with the steps of the slowest, once that has ended the step that is asked for."""
        self._waiting.append((source, asked))
        self._look()

    def _look(self) -> None:
        slowest = self.slowest
        still: list[tuple[int, Asked]] = []
        for source, asked in self._waiting:
            if slowest >= asked.body:
                self._post.answer(source, asked.ticket, slowest)
            else:
                still.append((source, asked))
        self._waiting = still


class WorkerClock:
    """A worker's steps.

    Args:
        server: the rank of the one that has the clock.
        max_staleness: how many steps ahead of the slowest worker a step may begin; None is any number.
    Attributes:
        steps: how many this worker has ended.
    """

    def __init__(self, post: Post, server: int, max_staleness: int | None) -> None:
        self._post, self._server, self._max_staleness = post, server, max_staleness
        self.steps = 0
        self._slowest = 0  # as far as is known here

    def begin(self) -> None:
        """Return when the next step may begin."""
        if self._max_staleness is None or self._slowest >= self.steps - self._max_staleness:
            return
        reply = self._post.ask(self._server, MAY_BEGIN, self.steps - self._max_staleness)
        try:
            self._slowest = reply.wait()
        except StallError:
            steps = {self._post.name_of(rank): n for rank, n in self.all_steps().items()}
            raise StallError(
                f"{self._post.name_of(self._post.rank)} has waited too long (MPISTRAT_STALL_SECONDS) to begin step "
                f"{self.steps} with max_staleness={self._max_staleness}; steps ended so far: {steps}"
            ) from None

    def end(self) -> None:
        self.steps += 1
        self._post.tell(self._server, ENDED, self.steps)

    def all_steps(self) -> dict[int, int]:
        """How many steps each worker has ended, by rank."""
        answer: Any = self._post.ask(self._server, STEPS).wait()
        return dict(answer)
