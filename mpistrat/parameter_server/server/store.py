"""The arrays of a server, their optimizers, and which updates they have had."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mpistrat.errors import NotFoundError
from mpistrat.indexed_slices import IndexedSlices
from mpistrat.parameter_server.protocol import tensors
from mpistrat.parameter_server.protocol.idempotency import IdempotencyCache, session_of
from mpistrat.parameter_server.protocol.messages import GradientMethod, NewArray, Update, Updates
from mpistrat.parameter_server.protocol.tables import Table
from mpistrat.parameter_server.rpc.remote_errors import outcome_of
from mpistrat.parameter_server.rpc.segments import Mappings, Segments
from mpistrat.parameter_server.server.optimizer_steps import ServerOptimizers

# An answer to an update brings the new value along if it has at most so many bytes.
SMALL_VALUE = 1 << 12


class Store:
    """Called by: the thread that serves.

    Args:
        find_elsewhere: is called with the key of each array that is asked for and is not here, and may add it.
    Attributes:
        by_key: the arrays.
        optimizers: of these arrays.
        idempotency: of their numbered updates.
        mappings: memory of the processes that send operands.
    """

    def __init__(self, find_elsewhere: Callable[[int], None] = lambda key: None) -> None:
        self.by_key: dict[int, Table] = {}
        self.optimizers = ServerOptimizers()
        self.idempotency = IdempotencyCache()
        self.mappings = Mappings()
        self._find_elsewhere = find_elsewhere
        self._segments = Segments()

    def create(self, new: NewArray) -> Table:
        """Make the array, unless it is here."""
        if not self.has(new.key):
            table = Table(new.name, new.spec, self._segments)
            if new.value is not None:
                with table.writing(updates=0) as array:
                    array[...] = tensors.unpack(new.value, self.mappings)
            self.by_key[new.key] = table
        return self.by_key[new.key]

    def has(self, key: int) -> bool:
        """Whether the array is here, or can be found elsewhere."""
        if key not in self.by_key:
            self._find_elsewhere(key)
        return key in self.by_key

    def table(self, key: int) -> Table:
        if not self.has(key):
            raise NotFoundError(f"this server has no array {key}: it has {len(self.by_key)}")
        return self.by_key[key]

    def pull(self, key: int, target: tensors.PackedTensor | None) -> tensors.InlineTensor | None:
        """The array: in the client's memory `target`, or returned."""
        table = self.table(key)
        if isinstance(target, tensors.SharedTensor):
            tensors.unpack(target, self.mappings)[...] = table.array
            return None
        return tensors.inline(
            table.array
        ).copied()  # MPI may read it later, when the array has changed

    def rows(self, key: int, indices: tensors.PackedTensor) -> tensors.InlineTensor:
        table = self.table(key)
        return tensors.inline(table.rows(tensors.unpack(indices, self.mappings)))

    def update(self, client: int, updates: Updates) -> list[tensors.InlineTensor | None]:
        """Make the updates that are not made yet, also those after one that fails.

        Returns: for each update, the value then, if it is small. Raises: the first error, once all have been tried.
        """
        self.idempotency.settle(session_of(client), updates.settled)
        outcomes = [outcome_of(partial(self._update, update, client)) for update in updates.updates]
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return outcomes

    def _update(self, update: Update, client: int) -> tensors.InlineTensor | None:
        table = self.table(update.key)

        def make() -> tensors.InlineTensor | None:
            operand, *values = [tensors.unpack(packed, self.mappings) for packed in update.operand]
            if values:
                operand = IndexedSlices(values[0], operand)
            if isinstance(update.method, GradientMethod):
                self.optimizers.step(update.key, table, update.method, operand, client)
                return None
            table.update(update.method, operand)
            return (
                tensors.inline(table.array).copied() if table.spec.nbytes <= SMALL_VALUE else None
            )

        return self.idempotency.once(update, table.name, make)

    def map_operands(self, updates: Updates) -> None:
        """Map the memory of all operands. Raises: OSError: the memory is gone."""
        for update in updates.updates:
            for operand in update.operand:
                if isinstance(operand, tensors.SharedTensor):
                    self.mappings.at(operand.handle)

    def make_optimizer(
        self, optimizer: int, packed: bytes, arrays: Sequence[tuple[int, bool]]
    ) -> None:
        definition = pickle.loads(packed)
        tables = [(key, self.table(key), shard) for key, shard in arrays]
        self.optimizers.make(optimizer, definition, tables)

    def optimizer_state(self, optimizer: int, key: int) -> Any:
        self.has(key)
        state = self.optimizers.of(optimizer, key).state_dict()
        return {name: copy.copy(value) for name, value in state.items()}  # as in `pull`

    def load_optimizer_state(self, optimizer: int, key: int, state: Any) -> None:
        self.has(key)
        self.optimizers.of(optimizer, key).load_state_dict(state)

    def sibling(self) -> Store:
        """An empty store for other arrays of this process, which shares the numbered updates and the mappings."""
        sibling = Store()
        sibling.idempotency, sibling.mappings = self.idempotency, self.mappings
        return sibling

    def adopt(self, other: Store) -> None:
        """Move all arrays of `other` here."""
        self.by_key.update(other.by_key)
        self.optimizers.adopt(other.optimizers)
        other.by_key, other.optimizers = {}, ServerOptimizers()
