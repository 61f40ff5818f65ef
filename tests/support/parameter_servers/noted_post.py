"""A `Post` without others: a test says what comes, and sees what goes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from mpistrat.parameter_server.rpc.rpc import Asked


class NotedPost:
    """
    Attributes:
        answers: (ticket, answer) in the order in which they were given; an error that was refused with as itself.
        notices: (to, kind, body) that were sent.
    """

    rank = 0

    def __init__(self) -> None:
        self.mail = SimpleNamespace(
            lost=set(), shares_memory_with=lambda rank: False, pid_of=lambda rank: None
        )
        self.name_of = "rank {}".format
        self.answers: list[tuple[int, Any]] = []
        self.notices: list[tuple[int, str, Any]] = []
        self._handlers: dict[str, Callable[[int, Any], None]] = {}
        self._when_lost: list[Callable[[int], None]] = []
        self._tickets = itertools.count()

    def handle(self, kind: str, handler: Callable[[int, Any], None]) -> None:
        self._handlers[kind] = handler

    def on_lost(self, handler: Callable[[int], None]) -> None:
        self._when_lost.append(handler)

    def tell(self, to: int, kind: str, body: Any = None) -> None:
        self.notices.append((to, kind, body))

    def answer(self, source: int, ticket: int, value: Any = None) -> None:
        self.answers.append((ticket, value))

    def refuse(self, source: int, ticket: int, error: BaseException) -> None:
        self.answers.append((ticket, error))

    def told(self, source: int, kind: str, body: Any = None) -> None:
        """A notice comes."""
        self._handlers[kind](source, body)

    def asked(self, source: int, kind: str, body: Any = None) -> int:
        """A request comes. Returns: its ticket."""
        ticket = next(self._tickets)
        self._handlers[kind](source, Asked(ticket, body))
        return ticket

    def answer_to(self, ticket: int) -> Any:
        """Raises: KeyError when there is none; what it was refused with."""
        answer = dict(self.answers)[ticket]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def lose(self, rank: int) -> None:
        self.mail.lost.add(rank)
        for handler in self._when_lost:
            handler(rank)
