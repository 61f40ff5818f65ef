"""The keys of the values that ranks compare."""

from __future__ import annotations

from typing import Any

# Key parts, in the order of reports: a difference of a parameter is reported before one of an optimizer.
PARAMETER, BUFFER, OPTIMIZER, VARIABLE, SCHEDULER, SCALER, TRAINING = range(7)
OF_GROUP, OF_PARAMETER = range(2)

Key = tuple[Any, ...]  # equal for the same value on every rank; keys sort in the order of reports
