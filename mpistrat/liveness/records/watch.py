"""The records of a communicator's calls, which ranks of a node share, and the attributes of calls that are watched."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from mpistrat.liveness.records.record import SINCE, TIMEOUT, RankRecord

if TYPE_CHECKING:
    from mpistrat.liveness.revocable_group import RevocableGroup


def has_not_come(made: int | None, call: int, *, is_member: bool = False) -> bool:
    """Whether the ranks in call number `call` of a communicator wait for a rank that has made `made` calls there.

    Args:
        made: None where the rank has not made the communicator.
        is_member: the communicator is to have the rank, made or not.
    """
    return is_member if made is None else made < call


@dataclass
class CommunicatorWatch:
    """A rank's place in one communicator.

    Attributes:
        record: where this rank writes what it does.
        slot: this communicator's slot in it.
        peers: the other ranks' words and the slot of this communicator in them, if all of them are on this node and
            can be read by all; else None.
        crowded: the communicator has more ranks on this node than the node has cores for them.
        revocable_group: of the communicator, where it outlives its ranks; else None.
        tell_others: as of `JobEnd`.
    """

    record: RankRecord = field(default_factory=lambda: RankRecord(None))
    slot: int = -1
    peers: list[tuple[memoryview, int]] | None = None
    crowded: bool = False
    revocable_group: RevocableGroup | None = None
    tell_others: Callable[[str, int, int], object] = lambda *_: None

    def __post_init__(self) -> None:
        if self.slot < 0:
            slot = self.record.new_slot(0, 1)
            if slot is None:
                raise ValueError("the record has no slot left for another communicator")
            self.slot = slot

    @property
    def timeout(self) -> float:
        """After how many seconds this rank raises a StallError when it waits for the others.

        0: never, and the settings say how long a call may last. Where the user has set nothing, a timeout takes the
        place of that limit (`RankRecord.limit_of`).
        """
        return self.record.words[self.slot + TIMEOUT] / 1e9

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self.record.words[self.slot + TIMEOUT] = int(seconds * 1e9)

    def stay_inside(self, stays: bool) -> None:
        """Whether this rank is still inside the collective that it has left: a callback of the program may hang."""
        self.record.words[self.slot + SINCE] = time.monotonic_ns() if stays else 0

    @contextlib.contextmanager
    def waiting(self, seconds: float) -> Iterator[None]:
        """Inside, this is the timeout."""
        before, self.timeout = self.timeout, seconds
        try:
            yield
        finally:
            self.timeout = before


class WatchedCalls(Protocol):
    """The calls of a communicator, as this rank's other threads read them.

    Attributes:
        name: the same on all ranks.
        calls: how many collectives this rank has entered.
        waiting_in: the one that it is inside of, in words; None outside.
        called_at: where the program called it.
        raising: the error of which this rank waits to tell the others; None where there is none.
        watch: where the calls are recorded.
        parts: the communicators that were made of this one.
    """

    name: str
    calls: int
    raising: Exception | None
    watch: CommunicatorWatch

    @property
    def waiting_in(self) -> object | None: ...

    @property
    def called_at(self) -> str: ...

    @property
    def parts(self) -> Sequence[WatchedCalls]: ...
