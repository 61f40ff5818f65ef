"""The interface of a contract, and the contract that stands in where calls are not checked."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from mpistrat.communicators.contract.agreement import CallAgreement
    from mpistrat.communicators.contract.call_signature import CallSignature
    from mpistrat.communicators.node.slots import Slot
    from mpistrat.communicators.transports.mpi import MpiTransport
    from mpistrat.liveness.records.watch import CommunicatorWatch
    from mpistrat.trace.timeline import Timeline

_NOTHING = contextlib.nullcontext()


class Unchecked:
    """The contract of a single rank, or of a group inside another group that checks and records the calls already.

    It checks nothing and records nothing.

    Attributes:
        name: the group's name, the same on all its ranks, and different from all other groups' names.
        watch: where the calls are recorded; None where they are not.
        timeline: where the calls are shown; None where they are not.
        agreement: how the ranks compare their calls; None where they do not.
        calls: number of collectives that this rank has entered.
        agreed: number of collectives that the ranks have compared.
        waiting_in: the signature of the collective that this rank is in, or None. A thread of `JobEnd` reads it.
        raising: the error that this rank is about to raise on all ranks, until the other ranks hear of it; else None.
        parts: the contracts of the communicators that were split off this one.
        recorded: the text of the last collective in the rank's record, and how many bytes of the text name the call.
        called_at: where the program called the last collective: "train.py:33 in main". A thread of `JobEnd` reads it,
            since that thread must not look at frames that still run.
        is_abandoned: whether this rank left a call while other ranks may still be in it. If so, no call can follow.
    """

    name = ""
    watch: CommunicatorWatch | None = None
    timeline: Timeline | None = None
    agreement: CallAgreement | None = None
    calls = agreed = 0
    waiting_in: CallSignature | None = None
    raising: Exception | None = None
    parts: Sequence[Unchecked] = ()
    recorded = b"", 0
    called_at = "an unknown place"
    is_abandoned = False

    def enter(
        self,
        signature: CallSignature,
        cause: Exception | None = None,
        slot: Slot | None = None,
        payload: Any = None,
        follows: bool = False,
    ) -> contextlib.AbstractContextManager[None]:
        """Return when all ranks have entered the same call. Returns: a context; the call lasts until its block ends.

        Args:
            signature: the call.
            cause: the error that has brought this rank here, or None. If the other ranks make another call, their
                CollectiveMismatchError shows it.
            slot: the memory that takes `payload`; None if the call has no slot.
            payload: bytes that the other ranks may read from the slot when `enter` returns.
            follows: inside `following`, True returns at once. Such a call must not end on any rank before all ranks
                have entered it.

        Raises: CollectiveMismatchError on all ranks if their calls differ. RuntimeError if this rank can make no call.
            StallError or RankLostError if a rank does not come.
        """
        return _NOTHING

    def following(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of `Communicator.following`."""
        return _NOTHING

    def raise_together(self, error: Exception) -> NoReturn:
        """Raise `error` here; ranks that wait in a collective get CollectiveMismatchError.

        If all ranks call this with errors of the same class, each rank raises its own error.
        """
        try:
            raise error
        finally:
            del error

    def of_part(self, mpi: MpiTransport, name: str, watch: CommunicatorWatch | None) -> Unchecked:
        """Return the contract of some of the ranks. Collective over them. `name` must be a new name."""
        return self

    def has_lost_a_rank(self) -> bool:
        """Whether this rank knows that a rank has failed and the other ranks go on without it. Not collective."""
        group = None if self.watch is None else self.watch.revocable_group
        return group is not None and group.lost

    def seconds_waited(self, last: int = 60) -> float:
        """Return the seconds that this rank waited for others to enter collectives of any communicator. Not collective.

        Args:
            last: the time until now that counts, in seconds, at most 63.

        Returns: 0.0 where calls are not recorded.
        """
        return 0.0 if self.watch is None else self.watch.record.seconds_waited(last)


UNCHECKED = Unchecked()
