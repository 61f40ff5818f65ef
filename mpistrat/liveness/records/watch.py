"""`CommunicatorWatch`: a rank's place in the records of one communicator. `WatchedCalls`: the recorded calls."""

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
    """Whether a rank is missing in a collective of a communicator: other ranks have entered it and this rank has not.

    Args:
        made: number of collectives that the rank has entered on the communicator; None if the rank has not made the
            communicator.
        call: number of the collective, from 1.
        is_member: returned if `made` is None: whether the communicator is to have the rank.
    """
    return is_member if made is None else made < call


@dataclass
class CommunicatorWatch:
    """A rank's record of one communicator, and its view of the other ranks' records.

    Attributes:
        record: this rank's record, a file in shared memory.
        slot: index in `record.words` of the communicator's slot; -1 takes a new slot.
        peers: for each other rank, the words of its record and the communicator's slot there; None unless all ranks are
            on this node and can read each other's records.
        crowded: whether the communicator has more ranks on this node than the node has cores for them.
        revocable_group: the communicator's revocable group; None if a rank's death ends the job.
        tell_others: `JobEnd.tell_others`; does nothing by default.
    Raises: ValueError if the record has no free slot.
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
        """Seconds after which this rank raises StallError when it waits for other ranks; 0: only the settings count.

        If the user has not set MPISTRAT_STALL_SECONDS, the timeout replaces that limit, see `RankRecord.limit_of`.
        """
        return self.record.words[self.slot + TIMEOUT] / 1e9

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self.record.words[self.slot + TIMEOUT] = int(seconds * 1e9)

    def stay_inside(self, stays: bool) -> None:
        """Record that this rank is inside the collective that it has left (True), or no longer is (False).

        So a callback of the program that hangs after a collective is reported as a stall.
        """
        self.record.words[self.slot + SINCE] = time.monotonic_ns() if stays else 0

    @contextlib.contextmanager
    def waiting(self, seconds: float) -> Iterator[None]:
        """In the block, `timeout` is `seconds`; afterwards it is as before."""
        before, self.timeout = self.timeout, seconds
        try:
            yield
        finally:
            self.timeout = before


class WatchedCalls(Protocol):
    """This rank's calls on a communicator, for other threads of the rank. `communicators.contract` implements it.

    Attributes:
        name: the communicator's name, the same on all ranks.
        calls: number of collectives that this rank has entered.
        waiting_in: a description of the collective that this rank is inside of; None outside of collectives.
        called_at: the line of the program that called the collective.
        raising: the error that this rank is about to raise on all ranks, while it waits to tell them; else None.
        watch: the communicator's watch, with the record of these calls.
        parts: the calls on communicators that were made from this one.
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
