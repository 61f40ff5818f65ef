"""How one rank keeps all servers as they are at one time.

It has each server hold back what others want to change. A push may have come to some of its servers before they were
told, and to others not: these let it through, so that it is in what is read on all of them, or on none.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from mpistrat.parameter_server.post import Asked, Post

# Requests, in this order: hold; let these through; and a notice: go on.
HOLD, ADMIT, RELEASE = "hold", "admit", "release"
_REMEMBERED = (
    16  # of each client: it waits for one before it begins the next, in each of its threads
)


class Push(NamedTuple):
    """What goes to several servers at once.

    Attributes:
        number: which grows, of those of one client.
        servers: their ranks.
    """

    number: int
    servers: tuple[int, ...]


class Gate:
    """Of a server: what others change goes through it."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._holder: int | None = None
        self._held: list[tuple[int, Push | None, Callable[[], None]]] = []
        self._next: deque[tuple[int, Asked]] = deque()  # who wants to hold it after that
        self._let: dict[int, deque[Push]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))
        self._admitted: set[tuple[int, int]] = set()  # client, and number
        self._asked: Asked | None = None  # to admit them
        post.handle(HOLD, self._hold)
        post.handle(ADMIT, self._admit)
        post.handle(RELEASE, lambda source, _: self._release(source))

    def enter(self, source: int, push: Push | None, work: Callable[[], None]) -> None:
        """Call `work` now, or when the gate is open again. Args: push: where the same goes to other servers, too."""
        admitted = push is not None and (source, push.number) in self._admitted
        if self._holder not in (None, source) and not admitted:
            self._held.append((source, push, work))
            return
        if push is not None:
            self._let[source].append(push)
        work()
        if admitted:
            assert push is not None
            self._admitted.discard((source, push.number))
            self._answer_if_all_came()

    def lost(self, rank: int) -> None:
        self._admitted = {one for one in self._admitted if one[0] != rank}  # they never come
        self._answer_if_all_came()
        self._release(rank)

    def _hold(self, source: int, asked: Asked) -> None:
        if self._holder is not None:
            self._next.append((source, asked))
            return
        self._holder = source
        let = {client: list(pushes) for client, pushes in self._let.items()}
        self._post.answer(source, asked.ticket, let)

    def _admit(self, source: int, asked: Asked) -> None:
        self._asked = asked
        self._admitted = set(asked.body)
        held, self._held = self._held, []
        for one in held:  # those of the dead, too: what has come has come whole
            self.enter(*one)
        self._admitted = {one for one in self._admitted if one[0] not in self._post.mail.lost}
        self._answer_if_all_came()

    def _answer_if_all_came(self) -> None:
        if self._asked is not None and not self._admitted and self._holder is not None:
            self._post.answer(self._holder, self._asked.ticket)
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
    let: Mapping[int, Mapping[int, Sequence[Push]]],
) -> dict[int, set[tuple[int, int]]]:
    """By server, the pushes, as client and number, that others have let through and it has not.

    Args: let: what each server answered, by client. Threads of a client may send in another order than that of numbers.
    """
    missing: dict[int, set[tuple[int, int]]] = {server: set() for server in let}
    for of_clients in let.values():
        for client, pushes in of_clients.items():
            for push in pushes:
                for server in push.servers:
                    known = [one.number for one in let[server].get(client, ())]
                    forgotten = len(known) == _REMEMBERED and push.number < min(known)
                    if push.number not in known and not forgotten:
                        missing[server].add((client, push.number))
    return missing
