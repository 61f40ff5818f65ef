"""Clocks: they count the steps of workers, and limit how far a worker may be ahead of the slowest.

Stale synchronous parallel, as in Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
Server", NIPS 2013. With a staleness of k, a worker may begin step c when all other workers have ended step c - k - 1.
With k = 0 no worker begins a step before all workers have ended the previous step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpistrat.errors import StallError, UnavailableError
from mpistrat.parameter_server.protocol.messages import ENDED, FAILED, MAY_BEGIN, STEPS, WhenSafe
from mpistrat.parameter_server.protocol.routes import FailoverRequest, Routes
from mpistrat.parameter_server.rpc.endpoint import Request, RpcEndpoint, outcome_of, without_errors


class ServerClock:
    """A server's clock: it counts the steps of all workers, and answers workers that ask whether they may begin.

    Args:
        workers: the workers' ranks. A worker that has left or died holds no other worker back.
        ended: the clock calls it with the number of steps that the slowest worker has ended, before any worker may
            begin a step. If it returns an error, each worker's next request to begin gets this error, once.
        when_safe: calls a function with its arguments once the server's backup has made the changes of `ended`.
    """

    def __init__(
        self,
        rpc: RpcEndpoint,
        workers: Sequence[int],
        ended: Callable[[int], Exception | None],
        when_safe: WhenSafe,
    ) -> None:
        self._on_ended = ended
        self._when_safe = when_safe
        self._steps = dict.fromkeys(workers, 0)
        self._working = set(workers)
        self._waiting: list[Request] = []
        self._errors: dict[int, Exception] = {}  # by the worker that must get the error
        rpc.handle(MAY_BEGIN, self._may_begin)
        rpc.handle(STEPS, lambda request: request.reply(self._steps))

    def steps_of(self, rank: int) -> int:
        """Return the number of steps that a rank has ended; 0 for a rank that is no worker."""
        return self._steps.get(rank, 0)

    def who_ended(self, step: int) -> int:
        """Return the number of workers that have ended the step (from 0), including workers that left later."""
        return sum(steps > step for steps in self._steps.values())

    def leave(self, rank: int) -> None:
        self._working.discard(rank)
        self.look()

    def ended(self, rank: int, steps: int) -> None:
        self._steps[rank] = steps
        self.look()

    def _may_begin(self, request: Request) -> None:
        """Reply with the steps that the slowest worker has ended, once they are at least the request's number."""
        self._waiting.append(request)
        self.look()

    def look(self) -> None:
        """Call `ended` with the number of steps of the slowest worker, then answer the workers that may begin.

        Called by: each change of the clock, and `Rounds.take_over`. Without workers the number is 2**62.
        """
        steps = [self._steps[rank] for rank in self._working]
        slowest = min(steps, default=1 << 62)
        error = self._on_ended(slowest)
        if error is not None:
            for worker in self._working:
                self._errors.setdefault(worker, error)
        waiting = self._waiting
        self._waiting = []
        for request in waiting:
            if slowest < request.body:
                self._waiting.append(request)
            else:
                outcome = self._errors.pop(request.source, slowest)
                self._when_safe(request.reply, outcome)


class WorkerClock:
    """A worker's clock: it counts the worker's steps, and waits for slower workers.

    The worker asks the clocks of the first server and of its backup. With a staleness of 0 it asks the clocks of all
    servers, because each server combines its gradients once all workers have ended a step.

    Args: max_staleness: the number of steps that a worker may be ahead of the slowest worker; None is any number.
    Attributes:
        steps: the number of steps that this worker has ended.
        combines: whether the servers combine the gradients of all workers (`max_staleness` is 0).
    """

    def __init__(self, routes: Routes, max_staleness: int | None) -> None:
        self._routes = routes
        self._max_staleness = max_staleness
        self.combines = max_staleness == 0
        first = routes.servers[0]
        self._servers = routes.servers if self.combines else routes.copies_of(first)
        self.steps = 0
        self._slowest = 0  # steps of the slowest worker, when this worker last asked
        self._has_sent = False

    def round_to_send_in(self) -> int | None:
        """Return the number (from 0) of the step that a gradient sent now belongs to.

        Returns None if servers apply gradients at once, because `max_staleness` is not 0.
        """
        if not self.combines:
            return None
        self._has_sent = True
        return self.steps

    def begin(self) -> None:
        """Wait until no other worker is more than `max_staleness` steps behind; return at once if that is None.

        Raises: the error of a server that could not apply an earlier combined step, once; StallError if a worker stays
            too far behind for MPISTRAT_STALL_SECONDS.
        """
        if self._max_staleness is None:
            return
        first = self.steps - self._max_staleness
        if self._slowest >= first:
            return
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
        """End a step. If this worker has sent gradients to be combined in it, wait until the servers have applied them.

        Raises: the error of a server that could not apply the combined step; StallError after MPISTRAT_STALL_SECONDS.
        """
        self.steps += 1
        self._notify(ENDED)
        if self._has_sent:
            self._has_sent = False
            self.begin()

    def fail(self) -> None:
        """Have the servers drop the gradients that this worker has sent in the current step.

        The step does not count, and the program may try it again.
        """
        if self._has_sent:
            self._has_sent = False
            self._notify(FAILED)

    def _notify(self, method: str) -> None:
        push = self._routes.next_push(self._servers)
        self._routes.rpc.notify_all(self._servers, method, (self.steps, push))

    def all_steps(self) -> dict[str, int]:
        """Ask the first server how many steps each worker has ended. Returns: the numbers by "worker 0 (rank 0)"."""
        steps = self._routes.call(self._servers[0], STEPS).wait()
        name_of = self._routes.rpc.name_of
        return {name_of(rank): ended for rank, ended in steps.items()}


def _all_of(calls: Sequence[FailoverRequest]) -> list[int]:
    """Wait for the replies of several servers, and return their values, in the order of `calls`.

    Raises: StallError or UnavailableError at once; the first other error after all replies have arrived.
    """
    answers: list[Any] = []
    for call in calls:
        answers.append(outcome_of(call.wait))
        if isinstance(answers[-1], (StallError, UnavailableError)):
            raise answers[-1]
    return without_errors(answers)
