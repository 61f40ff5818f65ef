"""Remote procedure calls between ranks: requests, their replies, notices, and errors that other ranks raise."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from mpistrat import errors
from mpistrat.errors import StallError, UnavailableError
from mpistrat.machine.notices import tell
from mpistrat.parameter_server.rpc.channel import LOST, Channel, Unreadable

# The first item of a message.
_NOTICE, _REQUEST, _REPLY = range(3)
SECONDS_BEHIND_ANOTHER = 0.05  # a thread waits behind the one that reads, before it checks again


class Request(NamedTuple):
    """A request, as its handler gets it.

    Attributes:
        source: the rank that has sent it.
        ticket: names it there.
    """

    channel: Channel
    source: int
    ticket: int
    body: Any

    def reply(self, outcome: Any = None) -> None:
        """Reply with a value, or with an error that the other rank raises, of a class that can be pickled."""
        self.channel.send(self.source, (_REPLY, self.ticket, outcome))


class PendingReply:
    """The reply to a request, which arrives later.

    Attributes:
        to: the rank that was asked.
        method: what it was asked for.
        come: whether the reply has arrived.
    """

    __slots__ = ("_outcome", "_rpc", "come", "method", "to")

    def __init__(self, rpc: RpcEndpoint, to: int, method: str) -> None:
        self._rpc, self.to, self.method = rpc, to, method
        self.come = False
        self._outcome: Any = None

    def wait(self, *, limited: bool = True) -> Any:
        """Wait for the reply's value.

        Args: limited: False where the reply depends on a third rank, which may take as long as it lives.
        Raises: the error that the other rank replied with; UnavailableError when that rank has died; StallError when it
            does not reply within MPISTRAT_STALL_SECONDS.
        """
        if not self.come:
            self._rpc.wait_for(self, limited)
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome

    def resolve(self, outcome: Any) -> None:
        self._outcome = outcome
        self.come = True


class RpcEndpoint:
    """Sends and handles requests and notices. It has no thread: a rank that waits reads for all its threads.

    Args:
        channel: nobody else may use it.
        name_of: how people call a rank, such as "ps 0 (rank 3)".
        stall_seconds: the longest wait for a reply; 0 is for ever.
    Attributes:
        stall_seconds: as given.
        describe_death: the text of the error about a rank that has died.
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
        self._handlers: dict[str, Callable[..., None]] = {}
        self._early: dict[str, list[tuple[Any, ...]]] = {}  # what came before its handler
        self._when_lost: list[Callable[[int], None]] = []
        self._tickets = itertools.count(1)
        self._open: dict[int, PendingReply] = {}
        self._reading = threading.Lock()
        self._news = threading.Condition()

    def handle(self, method: str, handler: Callable[..., None]) -> None:
        """Call `handler(source, body)` for each notice of this method, `handler(Request)` for each request.

        The thread that reads calls it. A handler must not wait for a reply.
        """
        with self._registering:  # what another thread reads meanwhile comes after the early ones
            self._handlers[method] = handler
            _call_all(partial(handler, *early) for early in self._early.pop(method, ()))

    def on_lost(self, handler: Callable[[int], None]) -> None:
        """Call `handler(rank)` once for each rank that dies, in the thread that reads."""
        self._when_lost.append(handler)

    def notify(self, to: int, method: str, body: Any = None) -> None:
        """Send a notice, which has no reply. Called by: any thread."""
        self.channel.send(to, (_NOTICE, method, body))

    def notify_all(self, ranks: Iterable[int], method: str, body: Any = None) -> None:
        """`notify` each of these ranks."""
        for rank in ranks:
            self.notify(rank, method, body)

    def call(self, to: int, method: str, body: Any = None) -> PendingReply:
        """Send a request. Called by: any thread."""
        reply = PendingReply(self, to, method)
        ticket = next(self._tickets)
        self._open[ticket] = reply
        if to in self.channel.lost:
            self._open.pop(ticket, None)
            reply.resolve(self.death_error(to))
        else:
            self.channel.send(to, (_REQUEST, method, ticket, body))
        return reply

    def run_until(self, until: Callable[[], bool], seconds: float = math.inf) -> bool:
        """Read messages and call handlers until `until()` is true.

        Called by: any thread. A thread checks `until` again as soon as another thread has handled messages.
        Returns: False when `seconds` are over before.
        Raises: the first error of a handler, once all messages that were read with its message have been handled.
        """
        end = time.monotonic() + seconds
        while not until():
            left = end - time.monotonic()
            if left <= 0:
                return False
            if self._reading.acquire(blocking=False):
                try:
                    # Another thread may have read the message before this thread got to read.
                    if not until():
                        received = self.channel.receive(left)
                        _call_all(partial(self._handle, *message) for message in received)
                finally:
                    self._reading.release()
                    with self._news:
                        self._news.notify_all()
            else:
                with self._news:
                    if not until():
                        self._news.wait(min(left, SECONDS_BEHIND_ANOTHER))
        return True

    def wait_for(self, reply: PendingReply, limited: bool = True) -> None:
        """Run until the reply has come. A wait that is not limited only warns. Raises: StallError."""
        if self.run_until(lambda: reply.come, self.stall_seconds or math.inf):
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
        """The error for a caller that needs a rank that has died."""
        return UnavailableError(self.describe_death(rank))

    def _handle(self, source: int, message: Any) -> None:
        if message == LOST:
            for ticket, reply in list(self._open.items()):
                if reply.to == source:
                    self._open.pop(ticket, None)
                    reply.resolve(self.death_error(source))
            _call_all(partial(handler, source) for handler in self._when_lost)
            return
        if isinstance(message, Unreadable):
            raise RuntimeError(
                f"what {self.name_of(source)} has sent cannot be unpickled: "
                f"{type(message.error).__name__}: {message.error}"
            ) from message.error
        kind, name, *content = message
        if kind == _REPLY:
            waiting = self._open.pop(name, None)
            if waiting is not None:
                waiting.resolve(*content)
            return
        arguments = (source, *content)
        if kind == _REQUEST:
            arguments = (Request(self.channel, *arguments),)
        with self._registering:
            handler = self._handlers.get(name)
            if handler is None:
                self._early.setdefault(name, []).append(arguments)
                return
        handler(*arguments)


def _call_all(calls: Iterable[Callable[[], None]]) -> None:
    """Call all of them. Raises: the first error, after the other calls."""
    errors: list[BaseException] = []
    for call in calls:
        try:
            call()
        except BaseException as error:
            errors.append(error)
    without_errors(errors)


_KNOWN_EVERYWHERE: tuple[type[Exception], ...] = (
    errors.InvalidArgumentError,
    errors.NotFoundError,
    errors.FailedPreconditionError,
    errors.UnavailableError,
    ValueError,
    IndexError,
    TypeError,
)


def outcome_of(work: Callable[[], Any]) -> Any:
    """What `work` returns, or the error that it raises."""
    try:
        return work()
    except Exception as error:
        return error


def without_errors(outcomes: list[Any]) -> list[Any]:
    """The outcomes. Raises: the first error among them."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


def portable_error(error: Exception) -> Exception:
    """A server's error, for the rank that sent the request.

    Returns: an error of the same class, or of a base class that all ranks have; otherwise a RuntimeError with the
        server's traceback.
    """
    for known in _KNOWN_EVERYWHERE:
        if isinstance(error, known):
            return known(str(error))
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return RuntimeError(f"the server failed:\n{trace}")


def attributed_error(error: BaseException, who: str) -> Exception:
    """A rank's error, for the ranks that wait for what it did not manage.

    Args: who: the rank and what it failed at, such as "worker 0 (rank 0) has not restored".
    Returns: an error of the same class, if that is built in or `mpistrat`'s and takes a text; otherwise a RuntimeError.
    """
    text = f"{who}: {type(error).__name__}: {error}"
    if isinstance(error, Exception) and type(error).__module__ in ("builtins", errors.__name__):
        with contextlib.suppress(TypeError):  # some take more than a text
            return type(error)(text)
    return RuntimeError(text)
