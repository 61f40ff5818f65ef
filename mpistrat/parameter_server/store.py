"""The arrays of a server, its optimizers, and which updates they have had."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mpistrat.errors import NotFoundError
from mpistrat.indexed_slices import IndexedSlices
from mpistrat.parameter_server.idempotency import IdempotencyCache
from mpistrat.parameter_server.optimizer_steps import OptimizerSteps, Step
from mpistrat.parameter_server.protocol import NewArray, Update, Updates
from mpistrat.parameter_server.rpc.segments import Mappings, Segments
from mpistrat.parameter_server.tables import Table
from mpistrat.parameter_server.tensors import InlineTensor, SharedTensor, inline, unpack
from mpistrat.parameter_server.update_numbers import session_of

# An answer to an update brings the new value along, up to here.
SMALL_VALUE = 1 << 12


class Store:
    """Called by: the thread that serves.

    Args: beside: another one of this process, which is told of the same pieces of work, and maps the same memory.
    Attributes:
        by_key: the arrays.
        optimizers: theirs.
        applied: their numbered updates.
        mappings: memory of those that send operands.
    """

    def __init__(self, beside: Store | None = None) -> None:
        self.by_key: dict[int, Table] = {}
        self.optimizers = OptimizerSteps()
        self.idempotency: IdempotencyCache = (
            IdempotencyCache() if beside is None else beside.idempotency
        )
        self.mappings: Mappings = Mappings() if beside is None else beside.mappings
        self._segments = Segments()

    def create(self, new: NewArray) -> Table:
        """Make it, unless that was done."""
        if new.key in self.by_key:
            return self.by_key[new.key]
        table = Table(new.name, new.spec, self._segments)
        if new.value is not None:
            with table.writing(updates=0) as array:
                array[...] = unpack(new.value, self.mappings)
        self.by_key[new.key] = table
        return table

    def table(self, key: int) -> Table:
        try:
            return self.by_key[key]
        except KeyError:
            raise NotFoundError(
                f"this server has no array {key}: it has {len(self.by_key)}"
            ) from None

    def update(self, client: int, asks: Updates) -> list[InlineTensor | Exception | None]:
        """Make updates, but for those that are made; also those after one that fails.

        Returns: of each, the value then, if it is small; or why it could not be made.
        """
        self.idempotency.settle(session_of(client), asks.settled)
        return [outcome_of(partial(self._update, one, client)) for one in asks.updates]

    def _update(self, update: Update, client: int) -> InlineTensor | None:
        table = self.table(update.key)
        return self.idempotency.once(update, table.name, lambda: self._apply(table, update, client))

    def _apply(self, table: Table, update: Update, client: int) -> InlineTensor | None:
        operand: Any = [unpack(one, self.mappings) for one in update.operand]
        operand = IndexedSlices(operand[1], operand[0]) if len(operand) == 2 else operand[0]
        if isinstance(update.method, Step):
            self.optimizers.step(update.key, table, update.method, operand, client)
            return None
        table.update(update.method, operand)
        return inline(table.array).copied() if table.spec.nbytes <= SMALL_VALUE else None

    def map_operands(self, asks: Updates) -> None:
        """Raises: OSError when the memory is gone."""
        for update in asks.updates:
            for operand in update.operand:
                if isinstance(operand, SharedTensor):
                    self.mappings.at(operand.handle)

    def make_optimizer(
        self, optimizer: int, packed: bytes, arrays: Sequence[tuple[int, bool]]
    ) -> None:
        recipe = pickle.loads(packed)
        tables = [(key, self.table(key), shard) for key, shard in arrays]
        self.optimizers.make(optimizer, recipe, tables)

    def adopt(self, other: Store) -> None:
        """From now on what `other` has is here."""
        self.by_key.update(other.by_key)
        self.optimizers.adopt(other.optimizers)
        other.by_key, other.optimizers = {}, OptimizerSteps()


def outcome_of(work: Callable[[], Any]) -> Any:
    """What `work` returns, or the error that it raises."""
    try:
        return work()
    except Exception as error:
        return error
