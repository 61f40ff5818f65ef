"""How values are combined, and when a variable's copies are."""

from __future__ import annotations

import enum


class ReduceOp(enum.Enum):
    """How the values of several replicas become one.

    Numbers have all five. Booleans have MAX (any), MIN and PRODUCT (all). Complex numbers have no MAX and no MIN.
    `IndexedSlices` have SUM and MEAN only. If one value is NaN, MAX and MIN are NaN.
    """

    SUM = "SUM"
    MEAN = "MEAN"
    MAX = "MAX"
    MIN = "MIN"
    PRODUCT = "PRODUCT"

    @property
    def adds_up(self) -> bool:
        """Whether it is a sum, or one that is divided."""
        return self is ReduceOp.SUM or self is ReduceOp.MEAN

    @classmethod
    def parse(cls, op: ReduceOp | str) -> ReduceOp:
        """`op` itself, or the member that a string names in any case ("sum", "Mean")."""
        if isinstance(op, cls):
            return op
        if isinstance(op, str) and (found := _BY_NAME.get(op) or _BY_NAME.get(op.upper())):
            return found
        names = ", ".join(cls.__members__)
        raise ValueError(
            f"reduce_op must be a ReduceOp, or its name in any case: {names}; got {op!r:.60}"
        )

    @staticmethod
    def from_variable_aggregation(aggregation: VariableAggregation) -> ReduceOp:
        """The reduction that a variable with `aggregation` applies to its updates."""
        if aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN):
            return ReduceOp[aggregation.name]
        raise ValueError(f"{aggregation} is not a reduction; only SUM and MEAN are")


_BY_NAME = {spelling: op for op in ReduceOp for spelling in (op.name, op.name.lower())}


class VariableSynchronization(enum.Enum):
    """When the copies of a distributed variable are brought together."""

    AUTO = "AUTO"
    NONE = "NONE"
    ON_WRITE = "ON_WRITE"
    ON_READ = "ON_READ"


class VariableAggregation(enum.Enum):
    """How updates (ON_WRITE) or copies (ON_READ) of a distributed variable are combined."""

    NONE = "NONE"
    SUM = "SUM"
    MEAN = "MEAN"
    ONLY_FIRST_REPLICA = "ONLY_FIRST_REPLICA"
