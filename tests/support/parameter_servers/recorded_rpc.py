"""A `RpcEndpoint` without others: a test says what comes, and sees what goes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from mpistrat.parameter_server.rpc.endpoint import Request


class RecordedRpc:
    """
    Attributes:
        replies: (ticket, answer) in the order in which they were given; an error that was refused with as itself.
        notices: (to, kind, body) that were sent.
    """

    rank = 0

    def __init__(self) -> None:
        self.channel: Any = SimpleNamespace(
            lost=set(),
            shares_memory_with=lambda rank: False,
            pid_of=lambda rank: None,
            send=lambda to, message: self.replies.append(message[1:]),
        )
        self.name_of = "rank {}".format
        self.replies: list[tuple[int, Any]] = []
        self.notices: list[tuple[int, str, Any]] = []
        self._handlers: dict[str, Callable[..., None]] = {}
        self._when_lost: list[Callable[[int], None]] = []
        self._tickets = itertools.count()

    def handle(self, kind: str, handler: Callable[..., None]) -> None:
        self._handlers[kind] = handler

    def on_lost(self, handler: Callable[[int], None]) -> None:
        self._when_lost.append(handler)

    def notify(self, to: int, kind: str, body: Any = None) -> None:
        self.notices.append((to, kind, body))

    def receive_notice(self, source: int, kind: str, body: Any = None) -> None:
        """A notice comes."""
        self._handlers[kind](source, body)

    def receive_request(self, source: int, kind: str, body: Any = None) -> int:
        """A request comes. Returns: its ticket."""
        ticket = next(self._tickets)
        self._handlers[kind](Request(self.channel, source, ticket, body))
        return ticket

    def reply_to(self, ticket: int) -> Any:
        """Raises: KeyError when there is none; what it was refused with."""
        answer = dict(self.replies)[ticket]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def lose(self, rank: int) -> None:
        self.channel.lost.add(rank)
        for handler in self._when_lost:
            handler(rank)


def call_now(call: Callable[..., None], *args: Any) -> None:
    """A `WhenSafe` of a server without a backup."""
    call(*args)
