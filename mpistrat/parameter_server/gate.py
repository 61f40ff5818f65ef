"""How one rank keeps all servers as they are at one time.

It has each server hold back what others want to change. A push may have come to some of its servers before they were
told, and to others not: these let it through, so that it is in what is read on all of them, or on none.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from mpistrat.parameter_server.rpc.endpoint import Request, RpcEndpoint

# Requests, in this order: hold; let these through; and a notice: go on.
HOLD, ADMIT, RELEASE = "hold", "admit", "release"
# Of each client, and part: it waits for one before it begins the next, in each of its threads.
REMEMBERED = 16


# Of a push: its client, its number, and which part.
_Part = tuple[int, int, "int | None"]


class Push(NamedTuple):
    """What goes to several servers at once.

    Attributes:
        number: which grows, of those of one client.
        servers: their ranks.
        part: which of these this part of it was for, though another may go on in its place; None where each is told the
            same.
    """

    number: int
    servers: tuple[int, ...]
    part: int | None = None


# By client and part.
_Let = dict[tuple[int, "int | None"], "deque[Push]"]


class Gate:
    """Of a server: what others change goes through it.

    Args: then: calls what it is given when all that went through is safe from the server's death.
    """

    def __init__(
        self, rpc: RpcEndpoint, then: Callable[[Callable[[], None]], None] = lambda call: call()
    ) -> None:
        self._rpc, self._then = rpc, then
        self._holder: int | None = None
        self._held: list[tuple[int, Push | None, Callable[[], None]]] = []
        self._next: deque[tuple[int, Request]] = deque()  # who wants to hold it after that
        self._let: _Let = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._admitted: set[_Part] = set()
        self._asked: Request | None = None  # to admit them
        rpc.handle(HOLD, self._hold)
        rpc.handle(ADMIT, self._admit)
        rpc.handle(RELEASE, lambda source, _: self._release(source))

    def enter(self, source: int, push: Push | None, work: Callable[[], None]) -> None:
        """Call `work` now, or when the gate is open again. Args: push: where the same goes to other servers, too."""
        part = push and (source, push.number, push.part)
        admitted = part in self._admitted
        if self._holder not in (None, source) and not admitted:
            self._held.append((source, push, work))
            return
        self.let(source, push)
        work()
        if part and admitted:
            self._admitted.discard(part)
            self._answer_if_all_came()

    def let(self, source: int, push: Push | None) -> None:
        """This has been let through, here or by who keeps the first copy."""
        if push is not None:
            self._let[source, push.part].append(push)

    def lost(self, rank: int) -> None:
        self._admitted = {one for one in self._admitted if one[0] != rank}  # they never come
        self._answer_if_all_came()
        self._release(rank)

    def _hold(self, source: int, request: Request) -> None:
        if self._holder is not None:
            self._next.append((source, request))
            return
        self._holder = source
        let = {which: list(pushes) for which, pushes in self._let.items()}
        self._rpc.reply(source, request.ticket, let)

    def _admit(self, source: int, request: Request) -> None:
        self._asked = request
        self._admitted = set(request.body)
        held, self._held = self._held, []
        for one in held:  # those of the dead, too: what has come has come whole
            self.enter(*one)
        self._admitted = {one for one in self._admitted if one[0] not in self._rpc.channel.lost}
        self._answer_if_all_came()

    def _answer_if_all_came(self) -> None:
        if self._asked is not None and not self._admitted and self._holder is not None:
            self._then(partial(self._rpc.reply, self._holder, self._asked.ticket))
            self._asked = None

    def _release(self, source: int) -> None:
        self._next = deque(one for one in self._next if one[0] != source)
        if self._holder != source:
            return
        self._holder, self._asked = None, None
        self._admitted.clear()
        held, self._held = self._held, []
        for one in held:
            self.enter(*one)
        if self._next:
            self._hold(*self._next.popleft())


def not_yet_everywhere(
    let: Mapping[int, Mapping[tuple[int, int | None], Sequence[Push]]],
    holder: Callable[[int], int] = lambda server: server,
) -> dict[int, set[_Part]]:
    """By server, the parts of pushes that have to get to it, because others have let through their parts.

    Args:
        let: what each server answered, by client and part. Threads of a client may send in another order than that of
            numbers.
        holder: the server that goes on in a server's place.
    """
    missing: dict[int, set[_Part]] = {server: set() for server in let}
    for of_clients in let.values():
        for (client, some_part), pushes in of_clients.items():
            for push in pushes:
                for server in push.servers:
                    to = holder(server)
                    part = None if some_part is None else server
                    if to in let and not _knows(let[to].get((client, part), ()), push.number):
                        missing[to].add((client, push.number, part))
    return missing


def _knows(let: Sequence[Push], number: int) -> bool:
    """Whether this is among what a server has let through, or so old that it does not remember."""
    known = [push.number for push in let]
    return number in known or (len(known) == REMEMBERED and number < min(known))
