"""Steps of optimizers on a server: at once, or with all workers' gradients together when they have ended a step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mpistrat import arrays
from mpistrat.errors import NotFoundError
from mpistrat.indexed_slices import IndexedSlices
from mpistrat.parameter_server.protocol.messages import GradientMethod
from mpistrat.parameter_server.protocol.tables import Table

if TYPE_CHECKING:
    from mpistrat.parameter_server.server import server_optimizers


class ServerOptimizers:
    """The optimizers of a server's arrays.

    Attributes:
        by_key: the optimizers, by number and array.
        pending: the workers' gradients, by round, then optimizer, array and how many times before.
    """

    def __init__(self) -> None:
        self.by_key: dict[tuple[int, int], server_optimizers.ServerOptimizer] = {}
        self.pending: dict[int, dict[tuple[int, int, int], _Pending]] = {}

    def make(
        self,
        optimizer: int,
        definition: server_optimizers.OptimizerDefinition,
        tables: Sequence[tuple[int, Table, bool]],
    ) -> None:
        """Args: tables: arrays that may lack this optimizer: their keys, and whether each is a part of a variable."""
        from mpistrat.parameter_server.server import server_optimizers

        for key, table, shard in tables:
            if (optimizer, key) not in self.by_key:
                self.by_key[optimizer, key] = server_optimizers.ServerOptimizer(
                    table.array, definition, shard=shard
                )

    def step(
        self, key: int, table: Table, step: GradientMethod, gradient: Any, worker: int
    ) -> None:
        """
        Args: gradient: an array, or `IndexedSlices`, in memory that may change after this.
        Raises: ValueError, TypeError, IndexError: the gradient does not fit.
        """
        optimizer = self.of(step.optimizer, key)
        if step.round is None:
            with table.writing():
                optimizer.step(gradient, step.hyperparameters)
            return
        optimizer.check(gradient)  # now: it is this worker's error
        of_round = self.pending.setdefault(step.round, {})
        for time in itertools.count():  # a worker may take several steps in one of the strategy's
            pending = of_round.setdefault((step.optimizer, key, time), _Pending(table, {}, {}))
            if worker not in pending.gradients:
                _check_alike(gradient, pending)
                pending.gradients[worker] = _copied(gradient)
                pending.steps[worker] = step
                return

    def pending_rounds(self, before: int) -> list[int]:
        """The rounds with smaller numbers that have not ended."""
        return sorted(number for number in self.pending if number < before)

    def end_rounds(
        self, before: int, who_ended: Callable[[int], int]
    ) -> list[tuple[str, Exception]]:
        """Make the steps of the rounds with smaller numbers, which all workers have ended.

        Args: who_ended: how many workers took part in a round.
        Returns: the names of arrays whose steps failed, with the errors. All others have stepped.
        """
        failed = []
        for number in self.pending_rounds(before):
            of_round = self.pending.pop(number)
            for (optimizer, key, _), pending in sorted(of_round.items(), key=lambda it: it[0][2]):
                try:
                    combined = _combined(pending, who_ended(number))
                    with pending.table.writing():
                        self.of(optimizer, key).step(combined, pending.first.hyperparameters)
                except Exception as error:  # an optimizer's may be any
                    failed.append((pending.table.name, error))
        return failed

    def forget(self, worker: int, ended: int) -> None:
        """Drop the gradients of a worker that has died, or failed, after so many steps: some may not have come."""
        for number in [number for number in self.pending if number >= ended]:
            of_round = self.pending[number]
            for pending in of_round.values():
                pending.gradients.pop(worker, None)
            self.pending[number] = {key: left for key, left in of_round.items() if left.gradients}

    def adopt(self, other: ServerOptimizers) -> None:
        """Move all optimizers of `other`, which are of other arrays, here."""
        self.by_key.update(other.by_key)
        for number, of_round in other.pending.items():
            self.pending.setdefault(number, {}).update(of_round)

    def of(self, optimizer: int, key: int) -> server_optimizers.ServerOptimizer:
        try:
            return self.by_key[optimizer, key]
        except KeyError:
            raise NotFoundError(
                f"this server has no optimizer {optimizer} of array {key}"
            ) from None


class _Pending(NamedTuple):
    table: Table
    steps: dict[int, GradientMethod]  # by worker
    gradients: dict[int, Any]

    @property
    def first(self) -> GradientMethod:
        """The step of the lowest rank, whichever came first."""
        return self.steps[min(self.gradients)]


def _check_alike(gradient: Any, pending: _Pending) -> None:
    for worker, other in pending.gradients.items():
        if isinstance(gradient, IndexedSlices) != isinstance(other, IndexedSlices):
            raise TypeError(
                f"the gradient of {pending.table.name!r} is one of some rows on one worker, and of the whole on "
                f"another (rank {worker}): to be combined, all need to be alike"
            )


def _copied(gradient: Any) -> Any:
    if isinstance(gradient, IndexedSlices):
        return IndexedSlices(arrays.copy(gradient.values), arrays.copy(gradient.indices))
    return arrays.copy(gradient)


def _combined(pending: _Pending, workers: int) -> Any:
    """The gradients of so many workers, added in the order of their ranks, so that the bits are the same each time."""
    gradients = [pending.gradients[worker] for worker in sorted(pending.gradients)]
    total = gradients[0]
    if isinstance(total, IndexedSlices):
        numbers = arrays.concatenate([gradient.values for gradient in gradients])
        indices = arrays.concatenate([gradient.indices for gradient in gradients])
        total = IndexedSlices(numbers, indices)
    else:
        numbers = total
        for gradient in gradients[1:]:
            numbers += gradient
    divisor = max(workers, len(gradients)) if pending.first.mean else 1
    if divisor > 1:
        numbers /= divisor
    return total
