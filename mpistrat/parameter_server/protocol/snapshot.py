"""Consistent snapshot: a client reads all servers as they are at one time.

The client pauses updates on every server, one after the other, and then drains the pushes that some servers have made
and others not: their parts pass the locks, so that what the client reads has a push on all its servers, or on none.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from mpistrat.errors import UnavailableError
from mpistrat.parameter_server.protocol.messages import Push, WhenSafe
from mpistrat.parameter_server.protocol.routes import Routes
from mpistrat.parameter_server.rpc.endpoint import Request, RpcEndpoint

# The client's messages: a request to pause, a request to let these parts of pushes pass, and a notice to go on.
HOLD, ADMIT, RELEASE = "hold", "admit", "release"
# Pushes per client and part. A client waits for a push before it begins the next, in each of its threads.
REMEMBERED = 16

_PartOfPush = tuple[int, int, "int | None"]  # client, number, part
_Which = tuple[int, "int | None"]  # client, part


class ChangeLock:
    """On a server: a lock on changes: those of other clients wait while one client holds it.

    Args: when_safe: for what has passed.
    """

    def __init__(self, rpc: RpcEndpoint, when_safe: WhenSafe) -> None:
        self._rpc, self._when_safe = rpc, when_safe
        self._holder: int | None = None
        self._held: list[tuple[int, Push | None, Callable[[], None]]] = []
        self._next: deque[Request] = deque()  # HOLD, of other clients
        # By client and part.
        self._passed: dict[_Which, deque[Push]] = defaultdict(partial(deque, maxlen=REMEMBERED))
        self._admitted: set[_PartOfPush] = set()  # may pass, and have not come yet
        self._admission: Request | None = None  # is answered when all of these have come
        rpc.handle(HOLD, self._hold)
        rpc.handle(ADMIT, self._admit)
        rpc.handle(RELEASE, self._release)

    def enter(self, source: int, push: Push | None, work: Callable[[], None]) -> None:
        """Call `work` now, or when no other client holds the lock any more.

        Args: push: where other servers get parts of it, too.
        """
        part = push and (source, push.number, push.part)
        admitted = part in self._admitted
        if self._holder not in (None, source) and not admitted:
            self._held.append((source, push, work))
            return
        self.passed(source, push)
        work()
        if admitted:
            self._admitted -= {part}
            self._answer_if_all_came()

    def passed(self, source: int, push: Push | None) -> None:
        """Remember that a push has passed, here or on the server whose backup this is."""
        if push is not None:
            self._passed[source, push.part].append(push)

    def lost(self, rank: int) -> None:
        """Wait for nothing of a rank that has died."""
        self._stop_waiting_for_lost()
        self._release(rank)

    def _hold(self, request: Request) -> None:
        if self._holder is not None:
            self._next.append(request)
            return
        self._holder = request.source
        request.reply({which: list(pushes) for which, pushes in self._passed.items()})

    def _admit(self, request: Request) -> None:
        self._admission = request
        self._admitted = set(request.body)
        self._enter_again()  # also what the dead have sent: it has come whole
        self._stop_waiting_for_lost()

    def _stop_waiting_for_lost(self) -> None:
        lost = self._rpc.channel.lost
        self._admitted = {part for part in self._admitted if part[0] not in lost}
        self._answer_if_all_came()

    def _enter_again(self) -> None:
        held, self._held = self._held, []
        for change in held:
            self.enter(*change)

    def _answer_if_all_came(self) -> None:
        if self._admission is not None and not self._admitted:
            self._when_safe(self._admission.reply)
            self._admission = None

    def _release(self, source: int, body: None = None) -> None:
        self._next = deque(request for request in self._next if request.source != source)
        if self._holder != source:
            return
        self._holder, self._admission = None, None
        self._admitted.clear()
        self._enter_again()
        if self._next:
            self._hold(self._next.popleft())


@contextlib.contextmanager
def consistent_snapshot(routes: Routes) -> Iterator[None]:
    """Inside, nobody else changes anything on the servers. Called by: a client."""
    held: list[int] = []
    try:
        while True:
            try:
                _hold_all(routes, held)
                break
            except UnavailableError:  # a server has died meanwhile
                if routes.lost():
                    raise
                _release_all(routes, held)
        yield
    finally:
        _release_all(routes, held)


def _hold_all(routes: Routes, held: list[int]) -> None:
    """Args: held: gets the servers that were asked, also those that have not answered in time."""
    passed: dict[int, Any] = {}
    for server in dict.fromkeys(map(routes.holder_of, routes.servers)):
        # All clients ask in this order: no two hold some servers each.
        held.append(server)
        passed[server] = routes.rpc.call(server, HOLD).wait()
    missing = not_yet_everywhere(passed, routes.holder_of)
    for reply in [routes.rpc.call(server, ADMIT, parts) for server, parts in missing.items()]:
        reply.wait()


def _release_all(routes: Routes, held: list[int]) -> None:
    while held:
        routes.rpc.notify(held.pop(), RELEASE)


def not_yet_everywhere(
    passed: Mapping[int, Mapping[_Which, Sequence[Push]]],
    holder: Callable[[int], int],
) -> dict[int, set[_PartOfPush]]:
    """By server, the parts of pushes that still have to pass there, because other parts have passed elsewhere.

    Args:
        passed: each server's answer, by client and part. Threads of a client may send in another order than that of
            numbers.
        holder: the server that goes on in a server's place.
    """
    missing: dict[int, set[_PartOfPush]] = {server: set() for server in passed}
    for of_clients in passed.values():
        for (client, some_part), pushes in of_clients.items():
            for push in pushes:
                for server in push.servers:
                    to = holder(server)
                    part = None if some_part is None else server
                    if to in passed and not _knows(passed[to].get((client, part), ()), push.number):
                        missing[to].add((client, push.number, part))
    return missing


def _knows(passed: Sequence[Push], number: int) -> bool:
    """Whether a server's pushes have this one, or it is so old that the server has forgotten it."""
    known = [push.number for push in passed]
    return number in known or (len(known) == REMEMBERED and number < min(known))
