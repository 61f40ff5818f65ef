"""Requests, their answers, and notices, between the ranks of a communicator."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from mpistrat.errors import StallError, UnavailableError
from mpistrat.machine.notices import tell
from mpistrat.parameter_server.rpc.channel import LOST, Channel
from mpistrat.parameter_server.rpc.unpickling import Unreadable

# Of a message: what it is, then what it says.
_NOTICE, _REQUEST, _ANSWER, _REFUSAL = range(4)
SECONDS_BEHIND_ANOTHER = 0.05  # thread that reads: until one looks whether it should

Handler = Callable[[int, Any], None]


class Request(NamedTuple):
    """A request, as its handler gets it."""

    ticket: int
    body: Any


class PendingReply:
    """What a request brings, later.

    Args: to: the rank that was asked. method: for what.
    """

    __slots__ = ("_answer", "_error", "_rpc", "come", "method", "to")

    def __init__(self, rpc: RpcEndpoint, to: int, method: str) -> None:
        self._rpc, self.to, self.method = rpc, to, method
        self.come = False
        self._answer: Any = None
        self._error: BaseException | None = None

    def wait(self, *, limited: bool = True) -> Any:
        """The answer.

        Args: limited: False where it depends on a third rank, which may take as long as it lives.
        Raises: what the other rank refused it with; UnavailableError when that rank has died; StallError when it does
            not answer within MPISTRAT_STALL_SECONDS.
        """
        if not self.come:
            self._rpc.wait_for(self, limited)
        if self._error is not None:
            raise self._error
        return self._answer

    def put(self, answer: Any, error: BaseException | None = None) -> None:
        self._answer, self._error = answer, error
        self.come = True


class RpcEndpoint:
    """Requests and notices over `channel`. It has no thread: whoever waits reads for all threads.

    Args:
        channel: used by nobody else.
        name_of: how people call a rank, such as "ps 0 (rank 3)".
        stall_seconds: how long a rank may take to answer a request; 0 is for ever.
    Attributes:
        stall_seconds: as given.
        describe_death: what is said of a rank that has died.
    """

    def __init__(
        self,
        channel: Channel,
        name_of: Callable[[int], str] = "rank {}".format,
        stall_seconds: float = 0,
    ) -> None:
        self.describe_death: Callable[[int], str] = lambda rank: f"{name_of(rank)} has died"
        self.channel = channel
        self.rank, self.size = channel.rank, channel.size
        self.name_of = name_of
        self.stall_seconds = stall_seconds
        self._registering = threading.RLock()
        self._handlers: dict[str, Handler] = {}
        self._early: dict[str, list[tuple[int, Any]]] = {}  # what came before its handler
        self._when_lost: list[Callable[[int], None]] = []
        self._tickets = itertools.count(1)
        self._open: dict[int, PendingReply] = {}
        self._reading = threading.Lock()
        self._news = threading.Condition()

    def handle(self, method: str, handler: Handler) -> None:
        """Call `handler(source, body)` for each notice of this method, `handler(source, Request)` for each request.

        In the thread that reads, which must not wait for an answer there.
        """
        with self._registering:  # what another thread reads meanwhile comes after what came early
            self._handlers[method] = handler
            _call_all(partial(handler, *one) for one in self._early.pop(method, ()))

    def on_lost(self, handler: Callable[[int], None]) -> None:
        """Call `handler(rank)` once for each rank that dies, in the thread that reads."""
        self._when_lost.append(handler)

    def notify(self, to: int, method: str, body: Any = None) -> None:
        """Send a notice. Called by: any thread."""
        self.channel.send(to, (_NOTICE, method, body))

    def call(self, to: int, method: str, body: Any = None) -> PendingReply:
        """Send a request. Called by: any thread."""
        reply = PendingReply(self, to, method)
        ticket = next(self._tickets)
        self._open[ticket] = reply
        if to in self.channel.lost:
            self._open.pop(ticket, None)
            reply.put(None, self.death_error(to))
        else:
            self.channel.send(to, (_REQUEST, method, ticket, body))
        return reply

    def reply(self, source: int, ticket: int, value: Any = None) -> None:
        self.channel.send(source, (_ANSWER, ticket, value))

    def reply_error(self, source: int, ticket: int, error: BaseException) -> None:
        """Answer with an error, of a class that can be pickled; the one who asked raises it."""
        self.channel.send(source, (_REFUSAL, ticket, error))

    def run_until(self, until: Callable[[], bool], seconds: float | None = None) -> bool:
        """Read, and call handlers, until `until()`; returns False when so many seconds are over before.

        Called by: any thread. What another one reads is looked at as soon as it has been handled.
        Raises: what a handler has raised, after all that was read with its message has been handled.
        """
        end = None if seconds is None else time.monotonic() + seconds
        while not until():
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return False
            if self._reading.acquire(blocking=False):
                try:
                    # Another thread may have read what was waited for, before this one got to read.
                    if not until():
                        _call_all(partial(self._handle, *one) for one in self.channel.receive(left))
                finally:
                    self._reading.release()
                    with self._news:
                        self._news.notify_all()
            else:
                with self._news:
                    if not until():
                        pause = SECONDS_BEHIND_ANOTHER
                        self._news.wait(pause if left is None else min(left, pause))
        return True

    def wait_for(self, reply: PendingReply, limited: bool = True) -> None:
        """Attend until the reply has come. Raises: StallError, if the wait is limited; else that is only told."""
        if self.run_until(lambda: reply.come, self.stall_seconds or None):
            return
        waited = (
            f"{self.name_of(self.rank)} has waited {self.stall_seconds:g} s (MPISTRAT_STALL_SECONDS) for "
            f"{self.name_of(reply.to)} to answer {reply.method!r}"
        )
        if limited:
            raise StallError(
                f"{waited}: see what that process does (py-spy dump), or whether it was stopped"
            )
        tell(f"{waited}, which depends on what another rank does, and waits on")
        self.run_until(lambda: reply.come)

    def death_error(self, rank: int) -> UnavailableError:
        """For who needs a rank that has died."""
        return UnavailableError(self.describe_death(rank))

    def _handle(self, source: int, message: Any) -> None:
        if message is LOST or message == LOST:
            for ticket, reply in list(self._open.items()):
                if reply.to == source:
                    self._open.pop(ticket, None)
                    reply.put(None, self.death_error(source))
            _call_all(partial(handler, source) for handler in self._when_lost)
            return
        if isinstance(message, Unreadable):
            raise RuntimeError(
                f"what {self.name_of(source)} has sent cannot be unpickled: "
                f"{type(message.error).__name__}: {message.error}"
            ) from message.error
        method = message[0]
        if method == _NOTICE:
            self._give(message[1], source, message[2])
        elif method == _REQUEST:
            _, name, ticket, body = message
            self._give(name, source, Request(ticket, body))
        else:
            _, ticket, value = message
            waiting = self._open.pop(ticket, None)
            if waiting is not None:
                if method == _ANSWER:
                    waiting.put(value)
                else:
                    waiting.put(None, value)

    def _give(self, method: str, source: int, body: Any) -> None:
        with self._registering:
            handler = self._handlers.get(method)
            if handler is None:
                self._early.setdefault(method, []).append((source, body))
                return
        handler(source, body)


def _call_all(calls: Iterable[Callable[[], None]]) -> None:
    """Call them all. Raises: what the first of those that failed raised, after the others."""
    errors: list[BaseException] = []
    for call in calls:
        try:
            call()
        except BaseException as error:
            errors.append(error)
    if errors:
        raise errors[0]
