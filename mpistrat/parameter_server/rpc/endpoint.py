"""Remote procedure calls between ranks: requests with replies, notices (messages without a reply), and errors."""

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

# The first item of each message.
_NOTICE, _REQUEST, _REPLY = range(3)
SECONDS_BEHIND_ANOTHER = 0.05  # a thread waits while another thread reads, before it checks again


class Request(NamedTuple):
    """A request, as its handler gets it. The handler, or a later event, calls `reply` once.

    Attributes:
        source: the rank that has sent the request.
        ticket: the request's number on that rank; the reply contains it.
        body: the method's argument, unpickled.
    """

    channel: Channel
    source: int
    ticket: int
    body: Any

    def reply(self, outcome: Any = None) -> None:
        """Send the reply: a value, or an exception for the other rank to raise; both are pickled."""
        self.channel.send(self.source, (_REPLY, self.ticket, outcome))


class PendingReply:
    """The future reply to a request.

    Attributes:
        to: the rank that gets the request.
        come: whether the reply has arrived.
    """

    __slots__ = ("_outcome", "_rpc", "come", "method", "to")

    def __init__(self, rpc: RpcEndpoint, to: int, method: str) -> None:
        self._rpc = rpc
        self.to = to
        self.method = method
        self.come = False
        self._outcome: Any = None

    def wait(self, *, limited: bool = True) -> Any:
        """Wait for the reply, and return its value.

        Args: limited: False for a reply that depends on a third rank and may take any time. After the endpoint's
            `stall_seconds` the wait then warns, and continues.
        Raises: the error that the other rank replied with; UnavailableError if that rank has died; with `limited`,
            StallError after `stall_seconds`.
        """
        if not self.come:
            self._rpc.wait_for(self, limited)
        return value_of(self._outcome)

    def resolve(self, outcome: Any) -> None:
        self._outcome = outcome
        self.come = True


class RpcEndpoint:
    """Sends and handles requests and notices.

    The endpoint has no thread of its own. A thread that waits reads the messages for all threads of the rank, and calls
    the messages' handlers.

    Args:
        channel: the messages between ranks; only this endpoint may use it.
        name_of: returns the name of a rank for messages, such as "ps 0 (rank 3)".
        stall_seconds: the longest wait for a reply; 0 waits for ever.
    Attributes: describe_death: returns the text of the error about a rank that has died.
    """

    def __init__(
        self,
        channel: Channel,
        name_of: Callable[[int], str] = "rank {}".format,
        stall_seconds: float = 0,
    ) -> None:
        self.describe_death: Callable[[int], str] = lambda rank: f"{name_of(rank)} has died"
        self.channel = channel
        self.rank = channel.rank
        self.size = channel.size
        self.name_of = name_of
        self.stall_seconds = stall_seconds
        self._registering = threading.RLock()
        self._handlers: dict[str, Callable[..., None]] = {}
        self._early: dict[str, list[tuple[Any, ...]]] = {}  # messages without a handler yet
        self._when_lost: list[Callable[[int], None]] = []
        self._tickets = itertools.count(1)
        self._open: dict[int, PendingReply] = {}
        self._reading = threading.Lock()
        self._news = threading.Condition()

    @property
    def own_name(self) -> str:
        """The name of this rank for messages."""
        return self.name_of(self.rank)

    def handle(self, method: str, handler: Callable[..., None]) -> None:
        """Set the handler of a method: `handler(source, body)` for its notices, or `handler(Request)` for its requests.

        The thread that reads messages (in `run_until` or a wait for a reply) calls the handler. For messages that have
        already arrived, `handle` itself calls it. A handler must not wait for a reply.
        """
        with self._registering:  # messages that another thread reads now are handled later
            self._handlers[method] = handler
            early = self._early.pop(method, ())
            _call_all(partial(handler, *arguments) for arguments in early)

    def on_lost(self, handler: Callable[[int], None]) -> None:
        """Have the thread that reads call `handler(rank)` once for each rank that dies."""
        self._when_lost.append(handler)

    def notify(self, to: int, method: str, body: Any = None) -> None:
        """Send a notice: a message without a reply. Called by: any thread."""
        self.channel.send(to, (_NOTICE, method, body))

    def notify_all(self, ranks: Iterable[int], method: str, body: Any = None) -> None:
        """Send the same notice to each of these ranks. Called by: any thread."""
        for rank in ranks:
            self.notify(rank, method, body)

    def call(self, to: int, method: str, body: Any = None) -> PendingReply:
        """Send a request, without waiting for the reply. Called by: any thread.

        Returns: the future reply. Its `wait` raises UnavailableError if the rank `to` has died, now or later.
        """
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
        """Read messages and call their handlers until `until()` is true.

        While another thread reads, this thread waits, and checks `until` after that thread has handled messages.

        Called by: any thread.
        Returns: True once `until()` is true; False if `seconds` pass before.
        Raises: the first error of a handler, after all messages that were read together have been handled.
        """
        end = time.monotonic() + seconds
        while not until():
            left = end - time.monotonic()
            if left <= 0:
                return False
            if self._reading.acquire(blocking=False):
                try:
                    # Another thread may have read the message before this thread began to read.
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
        """Read and handle messages until the reply has arrived.

        Raises: StallError after `stall_seconds`. With `limited=False` it warns after that time, and continues to wait.
        """
        if self.run_until(lambda: reply.come, self.stall_seconds or math.inf):
            return
        waited = (
            f"{self.own_name} has waited {self.stall_seconds:g} s (MPISTRAT_STALL_SECONDS) for "
            f"{self.name_of(reply.to)} to answer {reply.method!r}"
        )
        if limited:
            raise StallError(
                f"{waited}. See what that process does (py-spy dump), or whether it was stopped"
            )
        tell(f"{waited}. The answer depends on another rank: the wait continues")
        self.run_until(lambda: reply.come)

    def death_error(self, rank: int) -> UnavailableError:
        """Return the error for a caller that needs the dead `rank`, with the text of `describe_death`."""
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
    """Make all calls. Raises: the first error, after all calls."""
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


def outcome_of(work: Callable[..., Any], *args: Any) -> Any:
    """Call `work`, and return its result, or the Exception that it raises. Raises KeyboardInterrupt and SystemExit."""
    try:
        return work(*args)
    except Exception as error:
        return error


def value_of(outcome: Any) -> Any:
    """Return `outcome` as it is. Raises: `outcome` if it is an exception."""
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def without_errors(outcomes: list[Any]) -> list[Any]:
    """Return `outcomes` as they are. Raises: the first exception in the list."""
    return [value_of(outcome) for outcome in outcomes]


def portable_error(error: Exception) -> Exception:
    """Convert a server's error to an error that the rank with the request can unpickle.

    Returns: a new error with the same text, of the first class in `_KNOWN_EVERYWHERE` that `error` is an instance of;
        if there is none, a RuntimeError with the server's traceback in its text.
    """
    for known in _KNOWN_EVERYWHERE:
        if isinstance(error, known):
            return known(str(error))
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return RuntimeError(f"the server failed:\n{trace}")


def attributed_error(error: BaseException, who: str) -> Exception:
    """Return a copy of a rank's error for the other ranks, which wait for the work that failed.

    Args: who: the rank and the failed work, such as "worker 0 (rank 0) has not restored".
    Returns: an error of the same class, if the class is built in or in `mpistrat.errors` and can be made from a text;
        otherwise a RuntimeError. Its text is `who`, then the class and the text of `error`.
    """
    text = f"{who}: {type(error).__name__}: {error}"
    known = ("builtins", errors.__name__)
    if isinstance(error, Exception) and type(error).__module__ in known:
        with contextlib.suppress(TypeError):  # some classes take more than a text
            return type(error)(text)
    return RuntimeError(text)
