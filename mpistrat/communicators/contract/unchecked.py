"""`Unchecked`: the interface of a contract, and the contract of communicators without checks."""

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
    """A contract that checks and records nothing; `Contract` overrides its methods.

    A contract belongs to a communicator. This class serves a communicator of one rank, and a router that another
    communicator uses inside calls that it has checked and recorded itself.

    Attributes:
        name: the communicator's name, the same on all its ranks, and different from all other names.
        watch: the rank's record, in shared memory, of its calls, with its peers' records; None if calls are not
            recorded.
        timeline: the trace to which calls are added; None if no trace is written.
        agreement: how the ranks compare their calls; None if they do not.
        calls: number of collectives that this rank has entered.
        agreed: number of collectives that the ranks have compared.
        waiting_in: the signature of the collective that this rank is in, or None. A thread of `JobEnd` reads it.
        raising: the error that this rank is about to raise on all ranks, until the other ranks hear of it; else None.
        parts: the contracts of the communicators that were split off this one.
        recorded: the text of the last collective in the rank's record, how many bytes of the text name the call, and
            the call's stamp (see `CallAgreement`).
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
    recorded = b"", 0, 0
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
        """Wait until all ranks have entered the same call; here, do nothing.

        Args:
            signature: the call.
            cause: the error that made this rank come to this call, or None. If the other ranks make another
                call, the CollectiveMismatchError shows its text.
            slot: shared memory for `payload`; None if the call is not small, or if this rank writes nothing.
            payload: bytes that are written to the slot first; other ranks read them when they have entered the call.
            follows: True inside `following` does not wait for the other ranks. The call itself must then wait: it must
                not end on any rank before all ranks have entered it.

        Returns: a context around the moving of the bytes. The call ends with its block.

        Raises: CollectiveMismatchError on all ranks if their calls differ. RuntimeError if this rank can make no call.
            StallError or RankLostError if a rank does not come.
        """
        return _NOTHING

    def following(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of `Communicator.following`."""
        return _NOTHING

    def raise_together(self, error: Exception) -> NoReturn:
        """Raise `error`. With a `Contract`, ranks that wait in a collective raise CollectiveMismatchError.

        If all ranks call this with errors of the same class, each rank raises its own error.
        """
        try:
            raise error
        finally:
            del error

    def of_part(self, mpi: MpiTransport, name: str, watch: CommunicatorWatch | None) -> Unchecked:
        """Return the contract of a communicator that is split off, over some of the ranks; here, `self`.

        Called by: `Router.split`, on all ranks of the part.

        Args:
            mpi: the MPI transport over the ranks of the part.
            name: a name that no other communicator has.
            watch: the rank's record of its calls on the part, or None.
        """
        return self

    def has_lost_a_rank(self) -> bool:
        """Whether this rank knows that a rank has failed and the other ranks go on without it. Not collective."""
        if self.watch is None:
            return False
        group = self.watch.revocable_group
        return group is not None and group.lost

    def seconds_waited(self, last: int = 60) -> float:
        """Return the seconds that this rank waited for other ranks to enter collectives, of all communicators together.

        Not collective.

        Args:
            last: only waits in this many seconds until now count; at most 63.

        Returns: 0.0 where calls are not recorded.
        """
        if self.watch is None:
            return 0.0
        return self.watch.record.seconds_waited(last)


UNCHECKED = Unchecked()
