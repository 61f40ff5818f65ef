"""What a communicator asks of its contract, where there is none."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from mpistrat.communicators.contract.agreement import Agreement
    from mpistrat.communicators.contract.call_signature import CallSignature
    from mpistrat.communicators.node.slots import Slot
    from mpistrat.communicators.transports.mpi import MpiTransport
    from mpistrat.liveness.watch import CommunicatorWatch
    from mpistrat.trace.timeline import Timeline

_NOTHING = contextlib.nullcontext()


class Unchecked:
    """No contract: of one rank alone, or of a group inside another, whose calls are checked and recorded there.

    Attributes:
        name: the same on all ranks of the group, and different from all other groups' names.
        watch: where the calls are recorded; None where they are not.
        timeline: where the calls are shown; None where they are not.
        agreement: how the ranks compare their calls; None where they do not.
        calls: how many collectives this rank has entered.
        waiting_in: the signature of the collective this rank is inside of, else None. Read by the
            watcher of `job_end` on another thread, as is `called_at`: it must not look at frames that run on.
        called_at: where the program called the last collective: "train.py:33 in main".
    """

    name = ""
    watch: CommunicatorWatch | None = None
    timeline: Timeline | None = None
    agreement: Agreement | None = None
    calls = 0
    waiting_in: CallSignature | None = None
    called_at = "an unknown place"

    def enter(
        self,
        signature: CallSignature,
        cause: Exception | None = None,
        slot: Slot | None = None,
        payload: Any = None,
    ) -> contextlib.AbstractContextManager[None]:
        """Return once all ranks have entered the same call; it lasts until the result's block ends.

        Args:
            cause: what has kept this rank from what the others do; they hear of it, if they do something else.
            slot: where `payload` is put for the other ranks, who may read it when this returns.
        """
        return _NOTHING

    def raise_together(self, error: Exception) -> NoReturn:
        """Raise `error` here; the ranks that wait in a collective get CollectiveMismatchError.

        If all ranks come here with errors of the same class, each raises its own.
        """
        raise error

    def of_part(self, mpi: MpiTransport, name: str, watch: CommunicatorWatch | None) -> Unchecked:
        """The contract of some of the ranks, which `name` tells from other parts. Collective over them."""
        return self

    def abort(self, code: int) -> NoReturn:
        """End the whole job with exit code `code`. Not collective."""
        os._exit(code)

    def has_lost_a_rank(self) -> bool:
        """Whether this rank knows that one has failed, and that the others go on without it. Not collective."""
        group = None if self.watch is None else self.watch.revocable_group
        return group is not None and group.lost

    def seconds_waited(self, last: int = 60) -> float:
        """How long this rank waited for others to enter collectives, of any communicator. Not collective.

        Args:
            last: of how many seconds until now, at most 63.
        """
        return 0.0 if self.watch is None else self.watch.record.seconds_waited(last)


UNCHECKED = Unchecked()
