"""On a server: arrays and values that one rank, the creator, announces, and that other ranks wait for."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from functools import partial
from typing import Any

from mpistrat.errors import UnavailableError
from mpistrat.parameter_server.protocol.messages import CANNOT_CREATE, PUBLISH, PUBLISHED, WhenSafe
from mpistrat.parameter_server.rpc.endpoint import Request, RpcEndpoint


class Announcements:
    """Answers each rank that waits for a name once the name is announced.

    Args:
        creator: the rank that announces. Nobody waits once it has left.
        when_safe: for what was announced.
    """

    def __init__(self, rpc: RpcEndpoint, creator: int | None, when_safe: WhenSafe) -> None:
        self._rpc, self._creator, self._when_safe = rpc, creator, when_safe
        self._announced: dict[Hashable, Any] = {}
        self._waiting: dict[Hashable, list[Request]] = {}
        self._no_more: UnavailableError | None = None
        for method in (PUBLISH, CANNOT_CREATE):
            rpc.handle(method, lambda source, body: self.announce(*body))
        rpc.handle(PUBLISHED, lambda request: self.answer(request, request.body))

    def announce(self, name: Hashable, outcome: Any) -> None:
        """Args: name: a key, for an array. outcome: what the ranks that wait get; an error is raised there."""
        self._announced.setdefault(name, outcome)
        for request in self._waiting.pop(name, []):
            self.answer(request, name)

    def answer(self, request: Request, name: Hashable) -> None:
        """Reply once the name is announced."""
        if name not in self._announced and self._no_more is None:
            self._waiting.setdefault(name, []).append(request)
            return
        outcome = self._announced.get(name, self._no_more)
        self._when_safe(partial(request.reply, outcome))

    def leave(self, rank: int, died: bool) -> None:
        """Refuse to wait for more, if the rank is the creator."""
        if rank != self._creator or self._no_more is not None:
            return
        self._no_more = UnavailableError(
            f"{self._rpc.name_of(rank)} has {'died' if died else 'left'} before it made a variable, or told of a "
            "checkpoint, that others wait for"
        )
        waiting, self._waiting = self._waiting, {}
        for request in itertools.chain(*waiting.values()):
            request.reply(self._no_more)
