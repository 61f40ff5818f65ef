"""How far each worker is, and how far one may be ahead of the slowest.

Stale synchronous parallel, as in Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
Server", NIPS 2013. A worker may begin step c when all others have ended step c - k - 1: with k = 0 nobody begins a step
before all have ended the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mpistrat.errors import StallError, UnavailableError
from mpistrat.parameter_server.rpc.endpoint import Request, RpcEndpoint

if TYPE_CHECKING:
    from mpistrat.parameter_server.client import Client
    from mpistrat.parameter_server.routes import RoutedRequest

# Notices: so many steps are ended, and the `Push` that this is; the step after so many has failed, and the `Push`.
# Requests: whether the next may begin; how many steps each has ended.
ENDED, FAILED, MAY_BEGIN, STEPS = "steps ended", "step failed", "may begin", "steps"


class ServerClock:
    """On a server: the steps of all workers.

    Args:
        workers: ranks; those that are done, or lost, hold nobody back.
        ended: is told how many steps the slowest worker has ended, before anybody else is. An error that it returns is
            what each worker's next request to begin is refused with, once.
        then: calls what it is given when what `ended` did is safe from the server's death.
    """

    def __init__(
        self,
        rpc: RpcEndpoint,
        workers: Sequence[int],
        ended: Callable[[int], Exception | None] = lambda steps: None,
        then: Callable[[Callable[[], None]], None] = lambda call: call(),
    ) -> None:
        self._rpc, self._tell_ended, self._then = rpc, ended, then
        self._steps = dict.fromkeys(workers, 0)
        self._working = set(workers)
        self._waiting: list[tuple[int, Request]] = []
        self._errors: dict[int, Exception] = {}  # by worker, which has not been told yet
        rpc.handle(MAY_BEGIN, self._may_begin)
        rpc.handle(STEPS, lambda source, request: rpc.reply(source, request.ticket, self._steps))

    @property
    def slowest(self) -> int:
        """The steps of the worker that has ended fewest."""
        return min((self._steps[rank] for rank in self._working), default=1 << 62)

    def steps_of(self, rank: int) -> int:
        """How many it has ended; 0 for a rank that is no worker."""
        return self._steps.get(rank, 0)

    def who_ended(self, step: int) -> int:
        """How many workers have ended it, those that have left since included."""
        return sum(steps > step for steps in self._steps.values())

    def leave(self, rank: int) -> None:
        self._working.discard(rank)
        self.look()

    def ended(self, rank: int, steps: int) -> None:
        self._steps[rank] = steps
        self.look()

    def _may_begin(self, source: int, request: Request) -> None:
        """Answered with the steps of the slowest, once that has ended the step that is asked for."""
        self._waiting.append((source, request))
        self.look()

    def look(self) -> None:
        """Tell how far the slowest is, and let those begin that may."""
        slowest = self.slowest
        error = self._tell_ended(slowest)
        if error is not None:
            self._errors = {**dict.fromkeys(self._working, error), **self._errors}
        still: list[tuple[int, Request]] = []
        for source, request in self._waiting:
            if slowest >= request.body and source in self._errors:
                error = self._errors.pop(source)
                self._then(partial(self._rpc.reply_error, source, request.ticket, error))
            elif slowest >= request.body:
                self._then(partial(self._rpc.reply, source, request.ticket, slowest))
            else:
                still.append((source, request))
        self._waiting = still


class WorkerClock:
    """A worker's steps.

    Args:
        client: to the servers. The clock of the first one, and of who goes on in its place, is looked at; with 0 steps
            that of each, for each applies what the workers sent to it when all have ended a step.
        max_staleness: how many steps ahead of the slowest worker a step may begin; None is any number.
    Attributes:
        steps: how many this worker has ended.
    """

    def __init__(self, client: Client, max_staleness: int | None) -> None:
        self._client, self._rpc, self._max_staleness = client, client.rpc, max_staleness
        first = client.routes.copies_of(client.servers[0])
        self._servers = client.servers if max_staleness == 0 else first
        self.steps = 0
        self._slowest = 0  # as far as is known here
        self._has_sent = False

    @property
    def combines(self) -> bool:
        """Whether gradients of all workers are combined."""
        return self._max_staleness == 0

    def round_to_send_in(self) -> int | None:
        """The step with whose gradients one that is sent now is combined; None where it is applied at once."""
        if not self.combines:
            return None
        self._has_sent = True
        return self.steps

    def begin(self) -> None:
        """Return when the next step may begin.

        Raises: what a server could not apply of the steps before, once.
        """
        if self._max_staleness is None or self._slowest >= self.steps - self._max_staleness:
            return
        first = self.steps - self._max_staleness
        replies = [self._client.call(server, MAY_BEGIN, first) for server in self._servers]
        try:
            self._slowest = min(_all_of(replies))
        except StallError:
            steps = {self._rpc.name_of(rank): n for rank, n in self.all_steps().items()}
            raise StallError(
                f"{self._rpc.name_of(self._rpc.rank)} has waited too long (MPISTRAT_STALL_SECONDS) to begin step "
                f"{self.steps} with max_staleness={self._max_staleness}; steps ended so far: {steps}"
            ) from None

    def end(self) -> None:
        """Return when what this worker has sent in the step to be combined is applied, if there is any.

        Raises: as `begin`.
        """
        self.steps += 1
        self._tell(ENDED)
        if self._has_sent:
            self._has_sent = False
            self.begin()

    def fail(self) -> None:
        """The step is not ended: what was sent in it to be combined is dropped, for it may be tried again."""
        if self._has_sent:
            self._has_sent = False
            self._tell(FAILED)

    def _tell(self, what: str) -> None:
        push = self._client.next_push(self._servers)
        for server in self._servers:
            self._rpc.notify(server, what, (self.steps, push))

    def all_steps(self) -> dict[int, int]:
        """How many steps each worker has ended, by rank."""
        answer: Any = self._client.call(self._servers[0], STEPS).wait()
        return dict(answer)


def _all_of(replies: Sequence[RoutedRequest]) -> list[int]:
    """Raises: StallError, UnavailableError at once; the first other error when all have come."""
    answers, refusals = [], []
    for reply in replies:
        try:
            answers.append(reply.wait())
        except (StallError, UnavailableError):
            raise
        except Exception as error:
            refusals.append(error)
    if refusals:
        raise refusals[0]
    return answers
