"""Which updates a server has made: those that carry a number are made once, however often they come.

Who repeats a piece of work, because the rank that did it has died, repeats their numbers, too; and so does who repeats
a request, because the server that was asked has died, and another one goes on in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpistrat.errors import FailedPreconditionError
from mpistrat.parameter_server.protocol import Update
from mpistrat.parameter_server.tensors import InlineTensor


class IdempotencyCache:
    """What came of numbered updates: answers, or why they could not be made."""

    def __init__(self) -> None:
        # By piece of work, then array and number.
        self._outcomes: dict[int, dict[tuple[int, int], InlineTensor | Exception | None]] = {}
        self._over_before = 0  # pieces of work

    def __len__(self) -> int:
        return sum(map(len, self._outcomes.values()))

    def once(
        self, update: Update, name: str, make: Callable[[], InlineTensor | None]
    ) -> InlineTensor | None:
        """What `make` returns or raises, now or when it was called for this update.

        Args: name: of the array.
        """
        if update.work is None:
            return make()
        if 0 <= update.work < self._over_before:
            raise FailedPreconditionError(
                f"an update of {name!r} came after the work that it belongs to was over"
            )
        outcomes = self._outcomes.setdefault(update.work, {})
        which = update.key, update.number
        if which not in outcomes:
            try:
                outcomes[which] = make()
            except OSError:  # who asked has died, with its memory; it will be asked again
                raise
            except Exception as error:
                outcomes[which] = error
        found = outcomes[which]
        if isinstance(found, Exception):
            raise found
        return found

    def forget(self, over: Sequence[int], over_before: int) -> None:
        """Nobody repeats these pieces of work any more, nor any with a smaller number than `over_before`."""
        for work in over:
            self._outcomes.pop(work, None)
        if over_before > self._over_before:
            self._over_before = over_before
            # Those that were begun repeatedly are told of by this only. Sessions have numbers below 0.
            for work in [work for work in self._outcomes if 0 <= work < over_before]:
                del self._outcomes[work]

    def settle(self, session: int, before: int) -> None:
        """Nobody repeats the session's updates with smaller numbers."""
        outcomes = self._outcomes.get(session, {})
        for which in [which for which in outcomes if which[1] < before]:
            del outcomes[which]
