"""How far each worker is, and how far one may be ahead of the slowest.

Stale synchronous parallel, as in Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
Server", NIPS 2013. With a staleness of k, a worker may begin step c when all others have ended step c - k - 1. With
k = 0 nobody begins a step before all have ended the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mpistrat.errors import StallError, UnavailableError
from mpistrat.parameter_server.protocol.messages import ENDED, FAILED, MAY_BEGIN, STEPS, WhenSafe
from mpistrat.parameter_server.protocol.routes import FailoverRequest, Routes
from mpistrat.parameter_server.rpc.endpoint import Request, RpcEndpoint, outcome_of, without_errors


class ServerClock:
    """On a server: the steps of all workers.

    Args:
        workers: ranks. A worker that is done, or has died, holds nobody back.
        ended: is called with the number of steps that the slowest worker has ended, before any worker may begin. An
            error that it returns is what each worker's next request to begin is refused with, once.
        when_safe: for what `ended` has done.
    """

    def __init__(
        self,
        rpc: RpcEndpoint,
        workers: Sequence[int],
        ended: Callable[[int], Exception | None],
        when_safe: WhenSafe,
    ) -> None:
        self._on_ended, self._when_safe = ended, when_safe
        self._steps = dict.fromkeys(workers, 0)
        self._working = set(workers)
        self._waiting: list[Request] = []
        self._errors: dict[int, Exception] = {}  # by worker that has not got it yet
        rpc.handle(MAY_BEGIN, self._may_begin)
        rpc.handle(STEPS, lambda request: request.reply(self._steps))

    def steps_of(self, rank: int) -> int:
        """How many steps the rank has ended; 0 for a rank that is no worker."""
        return self._steps.get(rank, 0)

    def who_ended(self, step: int) -> int:
        """How many workers have ended the step, those that have left since included."""
        return sum(steps > step for steps in self._steps.values())

    def leave(self, rank: int) -> None:
        self._working.discard(rank)
        self.look()

    def ended(self, rank: int, steps: int) -> None:
        self._steps[rank] = steps
        self.look()

    def _may_begin(self, request: Request) -> None:
        """Reply with the slowest worker's steps, once that has ended the step in the request."""
        self._waiting.append(request)
        self.look()

    def look(self) -> None:
        """Report how far the slowest worker is, and let the workers begin that may."""
        slowest = min((self._steps[rank] for rank in self._working), default=1 << 62)
        error = self._on_ended(slowest)
        if error is not None:
            self._errors = {**dict.fromkeys(self._working, error), **self._errors}
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            if slowest < request.body:
                self._waiting.append(request)
            else:
                outcome = self._errors.pop(request.source, slowest)
                self._when_safe(partial(request.reply, outcome))


class WorkerClock:
    """A worker's steps.

    Args:
        routes: to the servers. The worker asks the clock of the first server, or of its backup. With a staleness of 0
            it asks those of all servers: each server combines the gradients that it got, once all workers have ended a
            step.
        max_staleness: how many steps ahead of the slowest worker a step may begin; None is any number.
    Attributes:
        steps: how many this worker has ended.
        combines: whether the gradients of all workers are combined.
    """

    def __init__(self, routes: Routes, max_staleness: int | None) -> None:
        self._routes, self._max_staleness = routes, max_staleness
        self.combines = max_staleness == 0
        self._servers = routes.servers if self.combines else routes.copies_of(routes.servers[0])
        self.steps = 0
        self._slowest = 0  # as far as this worker knows
        self._has_sent = False

    def round_to_send_in(self) -> int | None:
        """The step with whose gradients one that is sent now is combined; None where it is applied at once."""
        if not self.combines:
            return None
        self._has_sent = True
        return self.steps

    def begin(self) -> None:
        """Wait until the next step may begin.

        Raises: the error of the steps before that a server could not make, once.
        """
        if self._max_staleness is None or self._slowest >= self.steps - self._max_staleness:
            return
        first = self.steps - self._max_staleness
        calls = [self._routes.call(server, MAY_BEGIN, first) for server in self._servers]
        try:
            self._slowest = min(_all_of(calls))
        except StallError:
            rpc = self._routes.rpc
            raise StallError(
                f"{rpc.name_of(rpc.rank)} has waited too long (MPISTRAT_STALL_SECONDS) to begin step "
                f"{self.steps} with max_staleness={self._max_staleness}; steps ended so far: {self.all_steps()}"
            ) from None

    def end(self) -> None:
        """End a step. If this worker has sent gradients to be combined in it, wait until they are applied.

        Raises: as `begin`.
        """
        self.steps += 1
        self._notify(ENDED)
        if self._has_sent:
            self._has_sent = False
            self.begin()

    def fail(self) -> None:
        """Drop the gradients that this worker has sent in the step to be combined, for the step may be tried again."""
        if self._has_sent:
            self._has_sent = False
            self._notify(FAILED)

    def _notify(self, method: str) -> None:
        push = self._routes.next_push(self._servers)
        self._routes.rpc.notify_all(self._servers, method, (self.steps, push))

    def all_steps(self) -> dict[str, int]:
        """How many steps each worker has ended, by its name."""
        steps = self._routes.call(self._servers[0], STEPS).wait()
        return {self._routes.rpc.name_of(rank): ended for rank, ended in steps.items()}


def _all_of(calls: Sequence[FailoverRequest]) -> list[int]:
    """Raises: StallError and UnavailableError at once; the first other error when all replies have come."""
    answers: list[Any] = []
    for call in calls:
        answers.append(outcome_of(call.wait))
        if isinstance(answers[-1], (StallError, UnavailableError)):
            raise answers[-1]
    return without_errors(answers)
