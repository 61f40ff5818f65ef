"""Arrays and values that one rank, the creator, makes known and that others wait for. Of a server."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from mpistrat.errors import UnavailableError
from mpistrat.parameter_server.protocol import CANNOT_CREATE, PUBLISH, PUBLISHED
from mpistrat.parameter_server.rpc.endpoint import Request, RpcEndpoint


class Announcements:
    """Answers each rank that waits for a name once the name is announced.

    Args:
        creator: the rank that announces. Nobody waits once it has left.
        when_safe: calls its argument when all that was announced so far outlives this server.
    """

    def __init__(
        self,
        rpc: RpcEndpoint,
        creator: int | None,
        when_safe: Callable[[Callable[[], None]], None],
    ) -> None:
        self._rpc, self._creator, self._when_safe = rpc, creator, when_safe
        self._announced: dict[Hashable, Any] = {}
        self._waiting: dict[Hashable, list[tuple[int, int]]] = {}
        self._no_more: UnavailableError | None = None
        rpc.handle(PUBLISH, lambda source, body: self.announce(*body))
        rpc.handle(CANNOT_CREATE, lambda source, body: self.announce(*body))
        rpc.handle(PUBLISHED, self._await)

    def announce(self, name: Hashable, outcome: Any) -> None:
        """Args: name: a key, for an array. outcome: what the ranks that wait get; an error is raised there."""
        self._announced.setdefault(name, outcome)
        for source, ticket in self._waiting.pop(name, []):
            self.answer(source, ticket, name)

    def _await(self, source: int, request: Request) -> None:
        self.answer(source, request.ticket, request.body)

    def answer(self, source: int, ticket: int, name: Hashable) -> None:
        """Reply to a rank that waits for the name, now or later."""
        outcome = self._announced.get(name, self._no_more)
        if name not in self._announced and self._no_more is None:
            self._waiting.setdefault(name, []).append((source, ticket))
        elif isinstance(outcome, Exception):
            self._when_safe(partial(self._rpc.reply_error, source, ticket, outcome))
        else:
            self._when_safe(partial(self._rpc.reply, source, ticket, outcome))

    def leave(self, rank: int, died: bool) -> None:
        """Refuse to wait for more, if the rank is the creator."""
        if rank != self._creator or self._no_more is not None:
            return
        self._no_more = UnavailableError(
            f"{self._rpc.name_of(rank)} has {'died' if died else 'left'} before it made a variable, or told of a "
            "checkpoint, that others wait for"
        )
        waiting, self._waiting = self._waiting, {}
        for source, ticket in itertools.chain(*waiting.values()):
            self._rpc.reply_error(source, ticket, self._no_more)
