"""The arrays of a server, its optimizers, and which updates they have had."""

from __future__ import annotations

from typing import Any

from mpistrat.errors import NotFoundError
from mpistrat.indexed_slices import IndexedSlices
from mpistrat.parameter_server.applied import Applied
from mpistrat.parameter_server.optimizer_steps import OptimizerSteps, Step
from mpistrat.parameter_server.parcels import Carried, Placed, carried, unpack
from mpistrat.parameter_server.requests import Created, Update
from mpistrat.parameter_server.segments import Mappings, Segments
from mpistrat.parameter_server.tables import Table

# An answer to an update brings the new value along, up to here.
SMALL_VALUE = 1 << 12


class Store:
    """
    Attributes:
        by_key: the arrays.
        optimizers: theirs.
        applied: their numbered updates.
        mappings: memory of those that send operands.
    """

    def __init__(self) -> None:
        self.by_key: dict[int, Table] = {}
        self.optimizers = OptimizerSteps()
        self.applied = Applied()
        self.mappings = Mappings()
        self._segments = Segments()

    def create(self, new: Created) -> Table:
        """Make it, unless that was done."""
        if new.key in self.by_key:
            return self.by_key[new.key]
        table = Table(new.name, new.kind, self._segments)
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

    def update(self, update: Update, worker: int) -> Carried | None:
        """Make it, unless that was done; returns the value then, if it is small."""
        table = self.table(update.key)
        return self.applied.once(update, table.name, lambda: self._apply(table, update, worker))

    def _apply(self, table: Table, update: Update, worker: int) -> Carried | None:
        operand: Any = [unpack(one, self.mappings) for one in update.operand]
        operand = IndexedSlices(operand[1], operand[0]) if len(operand) == 2 else operand[0]
        if isinstance(update.method, Step):
            self.optimizers.step(update.key, table, update.method, operand, worker)
            return None
        table.update(update.method, operand)
        return carried(table.array).copied() if table.kind.nbytes <= SMALL_VALUE else None

    def map_operands(self, update: Update) -> None:
        """Raises: OSError when the memory is gone."""
        for operand in update.operand:
            if isinstance(operand, Placed):
                self.mappings.at(operand.place)
