"""Consistent snapshot: a client reads all servers as they are at one time.

The client pauses changes on every server, in turn. A push is one change that a client sends to several servers at the
same time. If only some of its servers have made a push, the client lets the missing parts pass the locks of the other
servers. So the client reads each push on all of its servers, or on none.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mpistrat.errors import UnavailableError
from mpistrat.parameter_server.protocol.messages import Push, WhenSafe
from mpistrat.parameter_server.protocol.routes import Routes
from mpistrat.parameter_server.rpc.endpoint import Request, RpcEndpoint

# The client's messages. HOLD: a request to pause. ADMIT: a request to let some parts of pushes pass. RELEASE: a notice
# that changes may continue.
HOLD = "hold"
ADMIT = "admit"
RELEASE = "release"
# Pushes that a server remembers per client and part. Each thread of a client waits for a push before its next push.
REMEMBERED = 16

_PartOfPush = tuple[int, int, "int | None"]  # client, number, part
_Which = tuple[int, "int | None"]  # client, part
# A change that waits: client, push, function, its arguments
_HeldChange = tuple[int, "Push | None", Callable[..., None], tuple[Any, ...]]


class ChangeLock:
    """A server's lock on changes. While one client holds it (in `consistent_snapshot`), other clients' changes wait.

    Args: when_safe: calls a function with its arguments once the server's backup has made the changes that have passed.
    """

    def __init__(self, rpc: RpcEndpoint, when_safe: WhenSafe) -> None:
        self._rpc = rpc
        self._when_safe = when_safe
        self._holder: int | None = None
        self._held: list[_HeldChange] = []
        self._next: deque[Request] = deque()  # HOLD, of other clients
        # The last pushes that have passed, by client and part.
        self._passed: dict[_Which, deque[Push]] = {}
        self._admitted: set[_PartOfPush] = set()  # parts that may pass and have not arrived
        self._admission: Request | None = None  # ADMIT, answered when all parts have arrived
        rpc.handle(HOLD, self._hold)
        rpc.handle(ADMIT, self._admit)
        rpc.handle(RELEASE, self._release)

    def enter(self, source: int, push: Push | None, work: Callable[..., None], *args: Any) -> None:
        """Call `work(*args)`, a change of the client `source`: now, or once no other client holds the lock.

        `work` is also called now if it is a part of a push that the lock's holder has admitted (by ADMIT).

        Args: push: the push that the change is a part of; None for a change of one server.
        """
        part = None if push is None else (source, push.number, push.part)
        admitted = part in self._admitted
        if self._holder not in (None, source) and not admitted:
            self._held.append((source, push, work, args))
            return
        self.passed(source, push)
        work(*args)
        if admitted:
            self._admitted -= {part}
            self._answer_if_all_came()

    def passed(self, source: int, push: Push | None) -> None:
        """Remember that a push has passed, on this server or on the primary that this server is the backup of."""
        if push is not None:
            which = (source, push.part)
            self._passed.setdefault(which, deque(maxlen=REMEMBERED)).append(push)

    def lost(self, rank: int) -> None:
        """Release the lock if the dead `rank` holds it, and stop waiting for the rank's admitted parts."""
        self._stop_waiting_for_lost()
        self._release(rank)

    def _hold(self, request: Request) -> None:
        if self._holder is not None:
            self._next.append(request)
            return
        self._holder = request.source
        passed = {which: list(pushes) for which, pushes in self._passed.items()}
        request.reply(passed)

    def _admit(self, request: Request) -> None:
        self._admission = request
        self._admitted = set(request.body)
        self._enter_again()  # also the changes of dead clients, which have arrived whole
        self._stop_waiting_for_lost()

    def _stop_waiting_for_lost(self) -> None:
        lost = self._rpc.channel.lost
        self._admitted = {part for part in self._admitted if part[0] not in lost}
        self._answer_if_all_came()

    def _enter_again(self) -> None:
        held = self._held
        self._held = []
        for source, push, work, args in held:
            self.enter(source, push, work, *args)

    def _answer_if_all_came(self) -> None:
        if self._admission is not None and not self._admitted:
            self._when_safe(self._admission.reply)
            self._admission = None

    def _release(self, source: int, body: None = None) -> None:
        self._next = deque(request for request in self._next if request.source != source)
        if self._holder != source:
            return
        self._holder = None
        self._admission = None
        self._admitted.clear()
        self._enter_again()
        if self._next:
            self._hold(self._next.popleft())


@contextlib.contextmanager
def consistent_snapshot(routes: Routes) -> Iterator[None]:
    """A context in which no other client changes anything on the servers. Its end lets changes go on.

    Its begin waits until all servers have paused. If a server with a backup dies meanwhile, all servers are released,
    and the living ones paused again.

    Called by: the rank that saves or restores a checkpoint.
    Raises: UnavailableError if a server has died, and no living server has its arrays.
    """
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
    """Pause changes on all living servers, and wait until each push is made on all of its servers, or on none.

    Args: held: this function appends each server before it asks the server, so that the caller can release it.
    Raises: UnavailableError if a server that it asks dies; the caller then releases all servers, and tries again.
    """
    passed: dict[int, Any] = {}
    holders = [routes.holder_of(server) for server in routes.servers]
    for server in dict.fromkeys(holders):
        # All clients ask in this order, so that no two clients hold some of the servers each.
        held.append(server)
        passed[server] = routes.rpc.call(server, HOLD).wait()
    missing = not_yet_everywhere(passed, routes.holder_of)
    replies = [routes.rpc.call(server, ADMIT, parts) for server, parts in missing.items()]
    for reply in replies:
        reply.wait()


def _release_all(routes: Routes, held: list[int]) -> None:
    while held:
        routes.rpc.notify(held.pop(), RELEASE)


def not_yet_everywhere(
    passed: Mapping[int, Mapping[_Which, Sequence[Push]]], holder: Callable[[int], int]
) -> dict[int, set[_PartOfPush]]:
    """Return, for each server, the parts of pushes that it lacks although another server has made its own part.

    A part is (client, push number, server that the part is for or None). The set is empty for a server that lacks none.

    Args:
        passed: each server's last pushes, by client and part. Their numbers may be out of order, because several
            threads of a client send.
        holder: returns the living server that stands in for a server.
    """
    missing: dict[int, set[_PartOfPush]] = {server: set() for server in passed}
    for of_clients in passed.values():
        for (client, some_part), pushes in of_clients.items():
            for push in pushes:
                for server in push.servers:
                    to = holder(server)
                    if to not in passed:
                        continue
                    part = None if some_part is None else server
                    last = passed[to].get((client, part), ())
                    if not _knows(last, push.number):
                        missing[to].add((client, push.number, part))
    return missing


def _knows(passed: Sequence[Push], number: int) -> bool:
    """Whether a server has made the push `number`, or it is too old for the last 16 pushes in `passed`."""
    known = [push.number for push in passed]
    is_full = len(known) == REMEMBERED
    return number in known or (is_full and number < min(known))
