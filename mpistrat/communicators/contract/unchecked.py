"""The interface of a contract, and what stands in its place where calls are not checked."""

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
    """The contract of one rank alone, or of a group inside another, where calls are checked and recorded already.

    Attributes:
        name: the same on all ranks of the group, and different from all other groups' names.
        watch: where the calls are recorded; None where they are not.
        timeline: where the calls are shown; None where they are not.
        agreement: how the ranks compare their calls; None where they do not.
        calls: how many collectives this rank has entered.
        agreed: how many of them the ranks have compared.
        waiting_in: the signature of the collective that this rank is in, or None. A thread of `JobEnd` reads it.
        raising: the error that this rank is about to raise on all, as long as it waits for the others to hear of it.
        parts: the contracts of the communicators that were made of this one.
        recorded: the text of that collective in the rank's record, and how many bytes of it name the call.
        called_at: where the program called the last collective: "train.py:33 in main". The same thread reads it, and
            must not look at frames that run on.
        is_abandoned: this rank left a call while others may still be in it: none can follow.
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
        """Return when all ranks have entered the same call. The call lasts until the result's block ends.

        Args:
            cause: the error that has brought this rank here; the others hear of it if they enter another call.
            slot: takes `payload`, which the other ranks may read when this returns.
            follows: in a block of `following`, return at once. The call must end on no rank before all have entered it.
        """
        return _NOTHING

    def following(self) -> contextlib.AbstractContextManager[None]:
        """As of `Communicator`."""
        return _NOTHING

    def raise_together(self, error: Exception) -> NoReturn:
        """Raise `error` here; the ranks that wait in a collective get CollectiveMismatchError.

        If all ranks come here with errors of the same class, each raises its own.
        """
        try:
            raise error
        finally:
            del error

    def of_part(self, mpi: MpiTransport, name: str, watch: CommunicatorWatch | None) -> Unchecked:
        """The contract of some of the ranks. Collective over them. `name` differs from that of other contracts."""
        return self

    def has_lost_a_rank(self) -> bool:
        """Whether this rank knows that a rank has failed and the others go on without it. Not collective."""
        group = None if self.watch is None else self.watch.revocable_group
        return group is not None and group.lost

    def seconds_waited(self, last: int = 60) -> float:
        """How long this rank waited for others to enter collectives, of any communicator. Not collective.

        Args:
            last: the number of seconds until now that count, at most 63.
        """
        return 0.0 if self.watch is None else self.watch.record.seconds_waited(last)


UNCHECKED = Unchecked()
