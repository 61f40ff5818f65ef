"""Reads an iterable of each rank's own batches (`local_batches=True`). All ranks take the same number of batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from mpistrat.communicators import Communicator
from mpistrat.input import readers
from mpistrat.input.splitting import ReplicaPieces
from mpistrat.machine.notices import tell


class LocalReader(readers.FunctionReader):
    """Reads an iterable that gives this rank's part of the data. The epoch ends with the shortest rank's iterable.

    Made by: every rank. The ranks tell each other their numbers of steps. If one rank does not know its number, the
        ranks ask each other at each step.
    Raises: ValueError if some ranks have no data for a step, and others have.
    """

    def __init__(
        self, batches: Iterable[Any], num_replicas: int, communicator: Communicator
    ) -> None:
        super().__init__([batches], num_replicas)
        length = readers.length_of(batches)
        steps = None if length == readers.UNKNOWN_CARDINALITY else length // num_replicas
        self._rank = communicator.rank
        self._has_spoken = False
        by_rank = communicator.all_gather_object(steps, label="steps of local batches")
        self._steps = None if None in by_rank else min(by_rank)
        self.steps_agreed = self._steps is not None
        if self.steps_agreed:
            readers.check_all_have_some(by_rank)
            self._tell(by_rank, f", {self._steps} steps", "rank {}: {}")

    def steps(self, epoch: int, start: int) -> Iterator[ReplicaPieces]:
        steps = super().steps(epoch, start)
        return steps if self._steps is None else itertools.islice(steps, self._steps - start)

    def num_steps(self) -> int | None:
        return self._steps

    def end(self, communicator: Communicator, has_more: bool) -> None:
        if not self._has_spoken:
            by_rank = communicator.all_gather_object(has_more, label="end of local batches")
            self._tell(by_rank, "", "rank {}")

    def _tell(self, amounts: list[Any], steps: str, name: str) -> None:
        """Let rank 0 name the ranks that have more data than the shortest rank, and so do not use all of their data.

        Args:
            amounts: for each rank, its number of steps, or whether it has a further step.
            steps: text about the number of steps; "" if the number is not known.
            name: a format string for a rank and its amount.
        """
        least = min(amounts)
        longer = []
        for rank, amount in enumerate(amounts):
            if amount > least:
                longer.append(name.format(rank, amount))
        self._has_spoken = bool(longer)
        if longer and self._rank == 0:
            if len(longer) > 16:
                longer[16:] = ["…"]
            tell(
                f"local batches end with the shortest rank{steps}: further batches of other ranks are left out in each "
                f"epoch ({', '.join(longer)})"
            )
