"""The arrays of a server, their optimizers, and the outcomes of their numbered updates."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mpistrat import arrays
from mpistrat.cross_device_ops.accumulation import add_slices
from mpistrat.errors import NotFoundError
from mpistrat.indexed_slices import IndexedSlices
from mpistrat.parameter_server.protocol.idempotency import IdempotencyCache, session_of
from mpistrat.parameter_server.protocol.messages import (
    GradientMethod,
    InlineTensor,
    NewArray,
    PackedTensor,
    SharedTensor,
    Update,
    Updates,
    inline,
    unpack,
)
from mpistrat.parameter_server.protocol.tables import Table
from mpistrat.parameter_server.rpc.endpoint import outcome_of, without_errors
from mpistrat.parameter_server.rpc.segments import Mappings, Segments

if TYPE_CHECKING:
    from mpistrat.parameter_server.server import server_optimizers


_OptimizerKey = tuple[int, int]  # its number, and the key of its array
_StepKey = tuple[int, int, int]  # also the number of the worker's earlier steps in the round


class ServerOptimizers:
    """The optimizers of a server's arrays, and the gradients that wait until their round (a step of all workers) ends.

    Attributes:
        by_key: the optimizers, by (optimizer number, array key).
        pending: the workers' gradients, by the round's number, then by (optimizer number, array key, number of the
            worker's earlier steps in the round).
    """

    def __init__(self) -> None:
        self.by_key: dict[_OptimizerKey, server_optimizers.ServerOptimizer] = {}
        self.pending: dict[int, dict[_StepKey, _Pending]] = {}

    def step(
        self, key: int, table: Table, step: GradientMethod, gradient: Any, worker: int
    ) -> None:
        """Step an array's optimizer with a worker's gradient, or keep a copy of the gradient until its round ends.

        Args:
            step: the method of the update. With `step.round` None, the step happens now.
            gradient: an array or `IndexedSlices`, in memory that may change later.
        Raises: ValueError, TypeError, IndexError: the gradient does not fit; TypeError if one worker of the round sends
            rows and another a whole array.
        """
        optimizer = self.of(step.optimizer, key)
        if step.round is None:
            with table.writing():
                optimizer.step(gradient, step.hyperparameters)
            return
        optimizer.check(gradient)  # now, so that this worker gets the error
        of_round = self.pending.setdefault(step.round, {})
        for time in itertools.count():  # a worker may step several times in a round
            pending = of_round.setdefault((step.optimizer, key, time), _Pending(table, {}, {}))
            if worker not in pending.gradients:
                _check_alike(gradient, pending)
                pending.gradients[worker] = _copied(gradient)
                pending.steps[worker] = step
                return

    def pending_rounds(self, before: int) -> list[int]:
        """Return the numbers below `before` of rounds with gradients, ascending."""
        over = [number for number in self.pending if number < before]
        return sorted(over)

    def end_rounds(
        self, before: int, who_ended: Callable[[int], int]
    ) -> list[tuple[str, Exception]]:
        """Apply the combined gradients of rounds (steps of all workers) with numbers below `before`.

        Called by: `Rounds` once all workers have ended these rounds, and the backup.
        Args: who_ended: returns the number of workers that took part in a round; a mean is divided by it.
        Returns: (array's name, error) of failed steps; all other steps have happened.
        """
        failed = []
        for number in self.pending_rounds(before):
            of_round = self.pending.pop(number)
            in_order = sorted(of_round.items(), key=lambda item: item[0][2])  # by time
            for (optimizer, key, _), pending in in_order:
                try:
                    combined = _combined(pending, who_ended(number))
                    with pending.table.writing():
                        self.of(optimizer, key).step(combined, pending.first.hyperparameters)
                except Exception as error:  # an optimizer may raise any error
                    failed.append((pending.table.name, error))
        return failed

    def forget(self, worker: int, ended: int) -> None:
        """Drop a worker's gradients of the rounds from number `ended` on: it has died, or its step has failed."""
        for number, of_round in self.pending.items():
            if number >= ended:
                for pending in of_round.values():
                    pending.gradients.pop(worker, None)
                left = {key: pending for key, pending in of_round.items() if pending.gradients}
                self.pending[number] = left

    def adopt(self, other: ServerOptimizers) -> None:
        """Add all optimizers and gradients of `other`, which are for other arrays."""
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
        """The step of the worker with the lowest rank, so that the order of arrival has no effect."""
        lowest = min(self.gradients)
        return self.steps[lowest]


def _check_alike(gradient: Any, pending: _Pending) -> None:
    is_sparse = isinstance(gradient, IndexedSlices)
    for worker, other in pending.gradients.items():
        if is_sparse != isinstance(other, IndexedSlices):
            raise TypeError(
                f"the gradient of {pending.table.name!r} is one of some rows (sparse) on one worker, and dense on "
                f"another (rank {worker}). Make the embedding sparse on all workers, or on none"
            )


def _copied(gradient: Any) -> Any:
    if isinstance(gradient, IndexedSlices):
        return IndexedSlices(arrays.copy(gradient.values), arrays.copy(gradient.indices))
    return arrays.copy(gradient)


def _combined(pending: _Pending, workers: int) -> Any:
    """Add or average a step's gradients in the order of ranks, so that the bits are the same each time.

    Args: workers: the number of workers that ended the round. It divides a mean, unless more workers sent gradients.
    Returns: an array (the first gradient, overwritten) or `IndexedSlices`.
    """
    gradients = [pending.gradients[worker] for worker in sorted(pending.gradients)]
    first = gradients[0]
    if isinstance(first, IndexedSlices):
        total = add_slices(gradients)
        numbers = total.values
    else:
        for other in gradients[1:]:
            first += other
        total = first
        numbers = first
    if pending.first.mean:
        numbers /= max(workers, len(gradients))
    return total


# A reply to an update contains the array's value up to this many bytes.
SMALL_VALUE = 1 << 12


class Store:
    """The arrays of a server, and the operations on them. Called by: the thread that serves.

    Args: find_elsewhere: the store calls it with the key of an array that it lacks; it may add the array.
    Attributes:
        by_key: the arrays.
        idempotency: the outcomes of numbered updates.
        mappings: the mapped memory of processes that send operands.
    """

    def __init__(self, find_elsewhere: Callable[[int], None] = lambda key: None) -> None:
        self.by_key: dict[int, Table] = {}
        self.optimizers = ServerOptimizers()
        self.idempotency = IdempotencyCache()
        self.mappings = Mappings()
        self._find_elsewhere = find_elsewhere
        self._segments = Segments()

    def create(self, new: NewArray) -> Table:
        """Make an array with its first value, unless the store has it. Returns: the array's table."""
        if self.has(new.key):
            return self.by_key[new.key]
        table = Table(new.name, new.spec, self._segments)
        with table.writing(updates=0) as array:
            array[...] = unpack(new.value, self.mappings)
        self.by_key[new.key] = table
        return table

    def has(self, key: int) -> bool:
        """Whether the store has the array. If not, first calls `find_elsewhere`, which may add the array or raise."""
        if key not in self.by_key:
            self._find_elsewhere(key)
        return key in self.by_key

    def table(self, key: int) -> Table:
        if not self.has(key):
            raise NotFoundError(f"this server has no array {key}: it has {len(self.by_key)}")
        return self.by_key[key]

    def pull(self, key: int, target: PackedTensor | None) -> InlineTensor | None:
        """Copy an array into the client's memory `target` and return None; if `target` is None, return a copy."""
        table = self.table(key)
        if isinstance(target, SharedTensor):
            memory = unpack(target, self.mappings)
            memory[...] = table.array
            return None
        # A copy, because MPI may send it later, when the array has changed.
        return inline(table.array).copied()

    def rows(self, key: int, indices: PackedTensor) -> InlineTensor:
        table = self.table(key)
        wanted = unpack(indices, self.mappings)
        return inline(table.rows(wanted))

    def update(self, client: int, updates: Updates) -> list[InlineTensor | None]:
        """Make a client's updates in order, except numbered updates that were made before.

        Returns: for each update, the array's value after it; None above 4 KB, and for an optimizer's step.
        Raises: the first error, after all updates have been tried.
        """
        session = session_of(client)
        self.idempotency.settle(session, updates.settled)
        outcomes = [outcome_of(self._update, update, client) for update in updates.updates]
        return without_errors(outcomes)

    def _update(self, update: Update, client: int) -> InlineTensor | None:
        table = self.table(update.key)

        def make() -> InlineTensor | None:
            operand, *values = [unpack(packed, self.mappings) for packed in update.operand]
            if values:
                operand = IndexedSlices(values[0], operand)
            method = update.method
            if isinstance(method, GradientMethod):
                self.optimizers.step(update.key, table, method, operand, client)
                return None
            table.update(method, operand)
            if table.spec.nbytes > SMALL_VALUE:
                return None
            return inline(table.array).copied()

        return self.idempotency.once(update, table.name, make)

    def map_operands(self, updates: Updates) -> None:
        """Map the memory of all operands. Raises: OSError if the client has died with it."""
        for update in updates.updates:
            for operand in update.operand:
                if isinstance(operand, SharedTensor):
                    self.mappings.at(operand.handle)

    def make_optimizer(
        self, optimizer: int, packed: bytes, arrays: Sequence[tuple[int, bool]]
    ) -> None:
        """Make an optimizer for arrays, except for arrays that have it.

        Args:
            packed: the pickled `OptimizerDefinition`.
            arrays: the key of each array, and whether the array is one part of a split variable.
        Raises: NotFoundError if the store lacks an array; TypeError if the optimizer cannot step a part.
        """
        from mpistrat.parameter_server.server.server_optimizers import ServerOptimizer

        definition = pickle.loads(packed)
        made = self.optimizers.by_key
        for key, shard in arrays:
            table = self.table(key)
            if (optimizer, key) not in made:
                made[optimizer, key] = ServerOptimizer(table.array, definition, shard=shard)

    def optimizer_state(self, optimizer: int, key: int) -> Any:
        self.has(key)
        state = self.optimizers.of(optimizer, key).state_dict()
        return {name: copy.copy(value) for name, value in state.items()}  # MPI may send it later

    def load_optimizer_state(self, optimizer: int, key: int, state: Any) -> None:
        self.has(key)
        self.optimizers.of(optimizer, key).load_state_dict(state)

    def sibling(self) -> Store:
        """Return an empty store that shares this store's `idempotency` and `mappings`. Called by: `BackupCopies`."""
        sibling = Store()
        sibling.idempotency = self.idempotency
        sibling.mappings = self.mappings
        return sibling

    def adopt(self, other: Store) -> None:
        """Move all arrays and optimizers of `other` to this store, and leave `other` empty."""
        self.by_key.update(other.by_key)
        self.optimizers.adopt(other.optimizers)
        other.by_key = {}
        other.optimizers = ServerOptimizers()
