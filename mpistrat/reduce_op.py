"""Enums: how the values of replicas are combined, and how and when the copies of a variable are combined."""

from __future__ import annotations

import enum


class ReduceOp(enum.Enum):
    """How the values of several replicas are combined into one.

    Numbers have all five operations. Booleans have MAX (any), MIN and PRODUCT (all). Complex numbers have no MAX and
    no MIN. `IndexedSlices` have SUM and MEAN only. If one value is NaN, MAX and MIN are NaN.

    Example:
        >>> ms.ReduceOp.parse("mean"), ms.ReduceOp.MEAN.adds_up, ms.ReduceOp.MAX.adds_up
        (<ReduceOp.MEAN: 'MEAN'>, True, False)
        >>> ms.ReduceOp.from_variable_aggregation(ms.VariableAggregation.SUM)
        <ReduceOp.SUM: 'SUM'>
    """

    SUM = "SUM"
    MEAN = "MEAN"
    MAX = "MAX"
    MIN = "MIN"
    PRODUCT = "PRODUCT"

    @property
    def adds_up(self) -> bool:
        """Whether the operation adds values up: True for SUM, and for MEAN, a sum that is then divided."""
        return self is ReduceOp.SUM or self is ReduceOp.MEAN

    @classmethod
    def parse(cls, op: ReduceOp | str) -> ReduceOp:
        """Return `op` itself, or the member that a string names in any case ("sum", "Mean").

        Raises: ValueError for anything else.
        """
        if isinstance(op, cls):
            return op
        if isinstance(op, str):
            found = _BY_NAME.get(op.upper())
            if found is not None:
                return found
        names = ", ".join(cls.__members__)
        raise ValueError(
            f"reduce_op must be a ReduceOp, or its name in any case: {names}; got {op!r:.60}"
        )

    @staticmethod
    def from_variable_aggregation(aggregation: VariableAggregation) -> ReduceOp:
        """Return the reduction that a variable with `aggregation` applies to its updates.

        Raises: ValueError unless `aggregation` is SUM or MEAN.
        """
        if aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN):
            return ReduceOp[aggregation.name]
        raise ValueError(f"{aggregation} is not a reduction; only SUM and MEAN are")


_BY_NAME = dict(ReduceOp.__members__)  # a look-up here is faster than in the class


class VariableSynchronization(enum.Enum):
    """When the copies of a distributed variable are combined.

    ON_WRITE: at each update, so that all copies stay equal.
    ON_READ: when a program reads the variable; until then each replica updates its own copy.
    AUTO: the same as ON_WRITE.
    NONE: not supported; a variable with NONE raises ValueError.

    Example:
        >>> on_read, total = ms.VariableSynchronization.ON_READ, ms.VariableAggregation.SUM
        >>> with ms.OneDeviceStrategy("cpu").scope():
        ...     seen = ms.Variable(0, synchronization=on_read, aggregation=total)
        >>> seen.synchronization
        <VariableSynchronization.ON_READ: 'ON_READ'>
    """

    AUTO = "AUTO"
    NONE = "NONE"
    ON_WRITE = "ON_WRITE"
    ON_READ = "ON_READ"


class VariableAggregation(enum.Enum):
    """How the updates of a distributed variable (ON_WRITE) or its copies (ON_READ) are combined.

    NONE: not at all; an update inside `run` changes only the replica's own copy.
    SUM: added up over all replicas.
    MEAN: averaged over all replicas.
    ONLY_FIRST_REPLICA: the first replica's value counts, and the others are ignored.

    Example:
        >>> with ms.OneDeviceStrategy("cpu").scope():
        ...     average = ms.Variable(0.0, aggregation=ms.VariableAggregation.MEAN)
        >>> average.aggregation
        <VariableAggregation.MEAN: 'MEAN'>
    """

    NONE = "NONE"
    SUM = "SUM"
    MEAN = "MEAN"
    ONLY_FIRST_REPLICA = "ONLY_FIRST_REPLICA"
