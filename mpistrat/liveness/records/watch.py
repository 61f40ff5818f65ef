"""`CommunicatorWatch`: the part of the ranks' records for one communicator. `WatchedCalls`: one rank's calls on it."""

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
    """Whether a rank has yet to enter collective number `call` of a communicator, where other ranks wait for it.

    Args:
        made: number of collectives that the rank has entered on the communicator; None if the rank has not made the
            communicator.
        call: number of the collective on the communicator, from 1.
        is_member: whether the rank belongs to the communicator; returned if `made` is None.
    """
    return is_member if made is None else made < call


@dataclass
class CommunicatorWatch:
    """Publishes this rank's waits in calls on one communicator to other processes, and reads the waits of other ranks.

    Each rank has a record in shared memory, with a slot for each communicator. The slot has the rank's last call on the
    communicator, and since when the rank is in it. Every wait for other ranks (`wait_until`) takes a watch.
    Made by: `NodeRecords`; without arguments, a watch that no other process sees.

    Attributes:
        record: this rank's record, a file in shared memory.
        slot: the index in `record.words` of this rank's slot for the communicator; the argument -1 takes a new slot.
        peers: for each other rank of the communicator, in rank order, the words of that rank's record and the index of
            its slot there; None unless all ranks are on this node and can read each other's records.
        crowded: whether the communicator's ranks on this node have less than one core each: a waiting rank must not
            spin then.
        revocable_group: the communicator's revocable group; None if a rank's death ends the job.
        tell_others: called when this rank leaves a collective with an error, so that the other ranks raise, too
            (`JobEnd.tell_others`); does nothing by default.
        left_out: the notice that a rank has left out a call on the communicator; "" if this rank knows of none.
    Raises: ValueError if `slot` is -1 and the record has no free slot.
    """

    record: RankRecord = field(default_factory=lambda: RankRecord(None))
    slot: int = -1
    peers: list[tuple[memoryview, int]] | None = None
    crowded: bool = False
    revocable_group: RevocableGroup | None = None
    tell_others: Callable[[str, int, int], object] = lambda *_: None
    left_out: str = ""

    def __post_init__(self) -> None:
        if self.slot < 0:
            slot = self.record.new_slot(0, 1)
            if slot is None:
                raise ValueError("the record has no slot left for another communicator")
            self.slot = slot

    @property
    def timeout(self) -> float:
        """Seconds after which this rank raises StallError in a wait for other ranks.

        0: no timeout; only MPISTRAT_STALL_SECONDS counts. If the user has not set that variable, a timeout replaces
        its default, see `RankRecord.limit_of`.
        """
        return self.record.words[self.slot + TIMEOUT] / 1e9

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self.record.words[self.slot + TIMEOUT] = int(seconds * 1e9)

    def stay_inside(self, stays: bool) -> None:
        """Let this rank's record show its last collective on the communicator as unfinished (True) or finished (False).

        Called by: futures of asynchronous collectives, with True before their callbacks run and False afterwards, so
        that a callback that hangs is reported as a stall.
        """
        since = time.monotonic_ns() if stays else 0
        self.record.words[self.slot + SINCE] = since

    @contextlib.contextmanager
    def waiting(self, seconds: float) -> Iterator[None]:
        """Set `timeout` to `seconds` (0: none) in the block; afterwards it is as before.

        Entered around: a barrier with a timeout, and the wait for the first rank of `first_rank_first`.
        """
        before = self.timeout
        self.timeout = seconds
        try:
            yield
        finally:
            self.timeout = before


class WatchedCalls(Protocol):
    """This rank's calls on one communicator, as the thread of `JobEnd` reads them. `Contract` implements it.

    Attributes:
        name: the communicator's name, the same on all ranks.
        calls: number of collectives that this rank has entered on the communicator.
        waiting_in: the collective that this rank is in (its text describes it); None outside of collectives.
        called_at: the line of the program that called this rank's last collective: "train.py:33 in main".
        raising: the error of this rank that all ranks are to raise, while this rank waits to tell them; else None.
        watch: the communicator's watch, this rank's entry for it in shared memory, where other processes see the calls.
        parts: one object like this for each communicator that was made from this communicator.
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
